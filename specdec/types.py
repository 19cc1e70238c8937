"""Plain types the services share; proto types stop at `specdec.wire`.

Terms (see docs/architecture.md): p is the target's distribution, q the
draft's; a round proposes, verifies and emits once for one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

MAX_DRAFT_TOKENS = 64
"""Most tokens drafted per round; bounds the rows one sequence adds to a step."""


class Acceptance(Enum):
    """How sampled drafts are accepted; each is exact."""

    REJECTION = "rejection"
    COUPLED = "coupled"


class TokenSource(Enum):
    """Where an output token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    TARGET = "target"


class FinishReason(Enum):
    """How a generation ends by itself; any other end is an error."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; validated where it is read from the wire."""

    temperature: float = 1.0
    """In [0, inf); 0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 0
    """At least 1; 0 is off."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off. Over prompt and output."""
    presence_penalty: float = 0.0
    """In [-2, 2]; 0 is off. Over the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; 0 is off. Over the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit), in ascending order of ids; in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] = ()
    """Ids that may be emitted; empty: all."""
    bad_words: tuple[str, ...] = ()
    """Strings that are not emitted."""
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    """The same as ids, each at least one; the output never holds one of these in a row."""
    min_tokens: int = 0
    """Tokens before which the generation does not end by itself."""
    end_token_ids: tuple[int, ...] = ()
    """Ids that end the generation, and are masked before min_tokens."""
    num_choices: int = 1
    """At least 1: how many generations one request gets."""
    seed: int | None = None
    """In [0, 2^64); None takes fresh entropy."""
    max_tokens: int | None = None
    """At least 1; None: up to the end of the context."""
    stop: tuple[str, ...] = ()
    """Strings the text ends before."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids the generation ends after."""
    ignore_eos: bool = False
    """Whether the model's EOS ids do not end the generation."""
    logprobs: int | None = None
    """Alternatives whose log-probabilities come with each token; None: not even its own."""
    include_stop_str_in_output: bool = False
    """Whether the text ends after the stop string instead of before it."""

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before temperature and truncation."""
        return (
            bool(self.logit_bias or self.allowed_token_ids or self.bad_word_token_ids)
            or (self.min_tokens > 0 and bool(self.end_token_ids))
            or self.has_penalty
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: log_softmax of the target's raw float32 logits."""

    logprob: float
    """Of the emitted token."""
    top: tuple[tuple[int, float], ...]
    """(id, log-probability) of the likeliest tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Whether and how to speculate."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    """Upper bound per round, in tokens; None: the deployment's."""
    acceptance: Acceptance = Acceptance.REJECTION
    drafter: str = ""
    """Name of the drafter; empty: the deployment's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingKeys:
    """Subkeys of one sequence's randomness, 64 bits each, one per purpose."""

    propose: int
    accept: int
    residual: int
    target: int


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The distribution q one drafted token was drawn from, as sampled."""

    probs: npt.NDArray[np.float32]
    """[support] probabilities."""
    token_ids: npt.NDArray[np.uint32] | None
    """[support] ids of `probs`, each once; None: ids 0, 1, ... (DENSE)."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter proposes for one round: a chain."""

    token_ids: tuple[int, ...] = ()
    """Drafted tokens, in order."""
    draft_probs: tuple[DraftDistribution, ...] = ()
    """One per token; empty when the tokens are deterministic or coupled."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target decided about one proposal."""

    output_token_ids: tuple[int, ...]
    """Accepted tokens, then one recovered or bonus token."""
    num_accepted_tokens: int
    """Length of the accepted prefix; excludes the recovered or bonus token."""
    num_draft_tokens: int
    """Drafted tokens that were verified; fewer than proposed after a redraw mismatch."""
    redraw_mismatch: bool = False
    """Whether a drafted token was not the draw from its q."""
    queue_ms: float = 0.0
    """From the item's arrival until its first step began, in ms."""
    step_ms: float = 0.0
    """Duration of the step that finished it, in ms."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per output token, if asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused when the sequence was taken up."""

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        """Where each output token came from."""
        if self.num_draft_tokens == 0:
            last = TokenSource.TARGET
        elif self.num_accepted_tokens < self.num_draft_tokens:
            last = TokenSource.RECOVERED
        else:
            last = TokenSource.BONUS
        return (TokenSource.ACCEPTED,) * self.num_accepted_tokens + (last,)
