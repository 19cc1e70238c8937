"""What the target keeps of one sequence, and what it is asked to do with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.trace import Span

from specdec.digest import PrefixDigest
from specdec.paged.sequence_kv import SequenceKV
from specdec.types import Proposal, SamplingKeys, SamplingParams, VerifyResult


class Status(Enum):
    """How an item ended."""

    OK = "ok"
    STALE = "stale"
    UNKNOWN_SEQUENCE = "unknown_sequence"
    MISMATCH = "mismatch"
    INVALID = "invalid"
    TOO_LARGE = "too_large"
    EXPIRED = "expired"
    NON_FINITE_LOGITS = "non_finite_logits"
    FAILED = "failed"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCommand:
    """Takes up a sequence."""

    sequence_id: int
    epoch: int
    token_ids: list[int]
    """Committed tokens, the pending one last."""
    num_prompt_tokens: int
    params: SamplingParams
    keys: SamplingKeys
    cache_salt: bytes = b""
    fork_of: int | None = None
    """A sequence of the session whose KV may be shared as far as tokens are equal."""
    refusal: tuple[Status, str] | None = None
    """Set when the opening is malformed: every item of it is answered with this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyItem:
    """One round of one sequence."""

    sequence_id: int
    epoch: int
    round_index: int
    base_length: int
    """Committed length L, pending token included."""
    digest: bytes
    proposal: Proposal
    deadline_s: float | None
    """time.monotonic() at which the request's time is up; None: never."""
    traceparent: str
    arrival_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class ReleaseCommand:
    """Lets a sequence go."""

    sequence_id: int
    epoch: int
    retained_length: int
    """Tokens retained in all."""


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The answer to one item."""

    item: VerifyItem
    status: Status
    detail: str = ""
    result: VerifyResult | None = None
    """Only when OK."""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One sequence held by the target.

    Index ranges, for a committed length L and K drafts:

        token_ids   [ 0 ......... L-2 ][ L-1     ][ L ... ]
                      KV computed       pending    provisional output
        rows of a verify:             [ pending, draft 0, ..., draft K-1 ]
        row j decides position          L        L+1           L+K
    """

    session_id: int
    sequence_id: int
    epoch: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    keys: SamplingKeys
    kv: SequenceKV
    arrival: int
    """Order of opening; earlier sequences go first."""
    digest: PrefixDigest = field(default_factory=PrefixDigest)
    item: VerifyItem | None = None
    """The round asked for, while it is not answered."""
    span: Span | None = None
    first_step_s: float | None = None
    """time.monotonic() when the item's first step began."""
    last_round_index: int = -1
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was reused; None before the first step."""
    idle_since_s: float = field(default_factory=time.monotonic)
    """time.monotonic() when the last item was answered."""
    refusal: tuple[Status, str] | None = None

    @property
    def waiting_since_s(self) -> float:
        """time.monotonic() when the item arrived."""
        assert self.item is not None
        return self.item.arrival_s

    @property
    def num_missing_tokens(self) -> int:
        """Committed tokens without KV, the pending one included."""
        assert self.item is not None
        return self.item.base_length - self.kv.num_computed_tokens
