"""One choice of one request: its tokens, its rounds, its end.

The orchestrator holds the full token list; target and drafter hold copies they
can be given again at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.trace import Span

from orchestrator.output import Finish, OutputStream
from specdec.digest import PrefixDigest
from specdec.types import (
    SamplingKeys,
    SamplingParams,
    SpeculationParams,
    TokenLogprobs,
    TokenSource,
    VerifyResult,
)


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One delivered token."""

    token_id: int
    source: TokenSource
    text: str
    """The text it released."""
    logprobs: TokenLogprobs | None = None
    """If asked for."""


@dataclass(slots=True)
class SpeculationStats:
    """How drafting went, counted over delivered tokens only."""

    num_rounds: int = 0
    num_drafted_rounds: int = 0
    """Rounds with at least one draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    num_output_tokens: int = 0

    def count(self, *, num_draft_tokens: int, num_accepted_tokens: int, num_output: int) -> None:
        """Adds one round, as far as it was delivered."""
        self.num_rounds += 1
        self.num_drafted_rounds += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_output_tokens += num_output
        per_position = self.num_accepted_tokens_per_position
        per_position += [0] * (num_draft_tokens - len(per_position))
        for position in range(num_accepted_tokens):
            per_position[position] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Delivered tokens per round."""
        return self.num_output_tokens / self.num_rounds if self.num_rounds else 0.0


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One choice in progress."""

    sequence_id: int
    token_ids: list[int]
    """Prompt and delivered tokens; the last one is pending."""
    num_prompt_tokens: int
    params: SamplingParams
    speculation: SpeculationParams
    keys: SamplingKeys
    output: OutputStream
    context_size: int
    """Most tokens of the sequence."""
    deadline_s: float | None
    """time.monotonic() at which the client stops waiting; None: never."""
    span: Span
    """The request's span."""
    fork_of: int | None = None
    """The sequence whose prompt this one has too; None: none."""
    digest: PrefixDigest = field(default_factory=PrefixDigest)
    round_index: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the target had."""
    finish: Finish | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def base_length(self) -> int:
        """Committed length L, pending token included."""
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens delivered."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_useful_draft_tokens(self) -> int:
        """Drafts beyond this could not be delivered: a round emits one token more."""
        room = min(self.output.num_tokens_left, self.context_size - self.base_length)
        return max(0, room - 1)

    def base_digest(self) -> bytes:
        """Digest of the committed tokens."""
        return self.digest.digest(self.token_ids, len(self.token_ids))

    def commit(self, result: VerifyResult, totals: SpeculationStats) -> list[OutputToken]:
        """Takes a round's output, up to the first terminal event.

        Args:
            result: What the target decided.
            totals: Statistics over all sequences, counted alike.

        Returns:
            The tokens to deliver; `finish` is set when they are the last.
        """
        delivered: list[OutputToken] = []
        logprobs = result.logprobs or (None,) * len(result.output_token_ids)
        for token_id, source, found in zip(
            result.output_token_ids, result.sources, logprobs, strict=True
        ):
            text, self.finish = self.output.push(token_id)
            self.token_ids.append(token_id)
            delivered.append(OutputToken(token_id, source, text, found))
            if self.finish is not None:
                break
        if self.round_index == 0:
            self.num_cached_tokens = min(result.num_cached_tokens, self.num_prompt_tokens)
        num_accepted = min(len(delivered), result.num_accepted_tokens)
        is_cut = len(delivered) < len(result.output_token_ids)
        for stats in (self.stats, totals):
            stats.count(
                # Drafts after the end were never asked for.
                num_draft_tokens=num_accepted if is_cut else result.num_draft_tokens,
                num_accepted_tokens=num_accepted,
                num_output=len(delivered),
            )
        self.round_index += 1
        return delivered
