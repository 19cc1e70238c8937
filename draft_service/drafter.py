"""What a drafter is, and what it keeps of one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from opentelemetry.trace import Span

from specdec.digest import PrefixDigest
from specdec.types import Acceptance, DraftDistribution, SamplingParams


class Status(Enum):
    """How an item ended."""

    OK = "ok"
    STALE = "stale"
    UNKNOWN_SEQUENCE = "unknown_sequence"
    MISMATCH = "mismatch"
    INVALID = "invalid"
    EXHAUSTED = "exhausted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCommand:
    """Takes up a sequence."""

    sequence_id: int
    epoch: int
    token_ids: list[int]
    drafter: str
    params: SamplingParams
    acceptance: Acceptance
    key: int
    """Subkey of purpose target in coupled mode, else of purpose propose."""
    is_dense: bool
    """Whether sampled proposals carry DENSE distributions, else SPARSE."""
    stop_token_ids: frozenset[int]
    num_prompt_tokens: int = 0
    refusal: tuple[Status, str] | None = None
    """Set when the opening is malformed: every item of it is answered with this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeItem:
    """A commit, and the proposal wanted on top of it."""

    sequence_id: int
    epoch: int
    round_index: int
    base_length: int
    digest: bytes
    token_ids: list[int]
    """Committed tokens from index base_length - len(token_ids) on."""
    num_speculative_tokens: int
    deadline_s: float | None
    """time.monotonic() at which the orchestrator stops waiting; None: never."""
    traceparent: str


@dataclass(slots=True)
class DraftSequence:
    """One sequence held by the draft service.

    `token_ids` are the committed tokens, `drafted` what has been proposed on
    top of them in the present round.
    """

    session_id: int
    opening: OpenCommand
    token_ids: list[int]
    drafted: list[int] = field(default_factory=list)
    item: ProposeItem | None = None
    """The round asked for, while its proposal is not final."""
    last_round_index: int = -1
    digest: PrefixDigest = field(default_factory=PrefixDigest)
    span: Span | None = None
    is_prefilled_ahead: bool = True
    """Whether the prompt's KV may be computed before a proposal is wanted."""
    state: Any = None
    """What the drafter itself keeps: its KV, its index."""

    @property
    def num_wanted(self) -> int:
        """Tokens the present proposal may still grow by."""
        return 0 if self.item is None else self.item.num_speculative_tokens - len(self.drafted)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one draft step added to one proposal."""

    sequence: DraftSequence
    token_ids: list[int]
    draft_probs: list[DraftDistribution]
    """q of each token, as sampled; empty when deterministic or coupled."""
    is_final: bool
    """Whether the drafter adds nothing more in this round."""
    status: Status = Status.OK
    detail: str = ""


class Drafter(ABC):
    """Proposes tokens for many sequences, a draft step at a time.

    All calls come from the engine thread. A drafter never decides on the ground
    of a drawn value whether that value is proposed (the censoring rule).
    """

    name: str
    owns_device: bool = True
    """Whether its steps compute; else they are look-ups, not worth a thread or a span."""

    @abstractmethod
    def open(self, sequence: DraftSequence) -> None:
        """Takes up a sequence; sets its `state`."""

    @abstractmethod
    def commit(self, sequence: DraftSequence, token_ids: list[int], start: int) -> None:
        """Learns which tokens were retained.

        Args:
            sequence: As before the commit, with the tokens drafted on top.
            token_ids: The committed tokens from index `start` on.
            start: At most the number of committed tokens held.
        """

    @abstractmethod
    def step(self, sequences: Seq[DraftSequence]) -> list[Drafted]:
        """Runs one draft step.

        Args:
            sequences: Those that want tokens, or have a prompt to compute.

        Returns:
            What was added; sequences that only computed KV may be left out.
        """

    @abstractmethod
    def release(self, sequence: DraftSequence) -> None:
        """Frees what is kept of a sequence."""

    def wants_step(self, sequence: DraftSequence) -> bool:
        """Whether a step would do something for a sequence that wants no tokens."""
        del sequence
        return False

    def fail(self, sequence: DraftSequence) -> None:
        """Throws away what a failed step may have left half done."""
        self.release(sequence)
        self.open(sequence)
