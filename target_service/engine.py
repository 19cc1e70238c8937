"""The target's engine: sequences in, results out, one step at a time.

A round is a transaction. The engine appends what a round emits to the
sequence's tokens, provisionally; the next item's base length states what the
orchestrator retained, and the rest is rolled back then.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from opentelemetry.trace import Span

from specdec.engine_thread import Engine
from specdec.paged.model import PagedModel
from specdec.paged.sequence_kv import SequenceKV
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing
from specdec.types import Proposal, VerifyResult
from target_service.model_runner import ModelRunner, NonFiniteLogitsError
from target_service.scheduler import Scheduler, Work
from target_service.sequence import (
    ItemOutcome,
    OpenCommand,
    ReleaseCommand,
    Sequence,
    Status,
    VerifyItem,
)

_log = structlog.get_logger(__name__)

_NO_ROOM_PAUSE_S = 0.002
# The sequences of a step come back one after the other within a millisecond or
# two. A step that began with the first of them would leave the others to a step of
# their own, and two half steps cost nearly twice a whole one.
_PATIENCE = 0.1
"""Share of the last step's duration that the next one waits for its sequences."""

Deliver = Callable[[list[ItemOutcome], int], None]
"""Takes one step's outcomes of one session, and the step's index; on the engine thread."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the start."""

    num_steps: int = 0
    num_redraw_mismatches: int = 0
    num_stale_items: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    """Rows computed."""
    step_s: float = 0.0
    """Time spent in steps, in s."""
    max_batch_size: int = 0


class TargetEngine(Engine):
    """Owns the model, the pool and every sequence."""

    def __init__(
        self,
        model: PagedModel,
        *,
        context_size: int,
        max_prefill_tokens: int,
        max_batch_size: int,
        tracing: Tracing,
        max_sequences: int = 512,
        max_overcommit: float = 16.0,
        check_integrity: bool = False,
    ) -> None:
        """Makes the engine, not started.

        Args:
            model: The model over its pool.
            context_size: Most tokens of a sequence, drafts included.
            max_prefill_tokens: Most prompt tokens of a step.
            max_batch_size: Most sequences of a step.
            tracing: Where spans go.
            max_sequences: Most sequences held; more are refused.
            max_overcommit: Most KV they may need, in sizes of the pool.
            check_integrity: Whether to check the pool after every step.
        """
        super().__init__("target-engine")
        self._model = model
        self._pool = model.block_pool
        self._context_size = context_size
        self._tracing = tracing
        self._check_every_step = check_integrity
        self._max_sequences = max_sequences
        self._max_needed_blocks = int(max_overcommit * self._pool.num_blocks)
        self._runner = ModelRunner(model)
        self._scheduler = Scheduler(
            self._pool,
            evict=self._free,
            max_prefill_tokens=max_prefill_tokens,
            max_batch_size=max_batch_size,
        )
        self._sequences: dict[tuple[int, int], Sequence] = {}  # oldest first
        self._deliver: dict[int, Deliver] = {}
        self._num_opened = 0
        self._num_waiting = 0
        self._step_works: list[Work] = []
        self._expected: set[tuple[int, int]] = set()
        """Sequences answered by the last step whose next item has not come."""
        self._patience_ends_s = 0.0
        self.stats = EngineStats()

    # Gauges, read from any thread.

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are free."""
        return self._pool.num_free

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    @property
    def num_sessions(self) -> int:
        """Sessions open."""
        return len(self._deliver)

    @property
    def num_waiting(self) -> int:
        """Items that wait for a step."""
        return self._num_waiting

    @property
    def num_cached_blocks(self) -> int:
        """KV blocks in the prefix cache."""
        return self._pool.num_cached

    @property
    def num_preemptions(self) -> int:
        """Sequences whose KV was dropped to make room, since the start."""
        return self._scheduler.num_preemptions

    # Commands, on the engine thread.

    def open_session(self, session_id: int, deliver: Deliver) -> None:
        """Begins a session; its outcomes go to `deliver`."""
        self._deliver[session_id] = deliver

    def close_session(self, session_id: int) -> None:
        """Ends a session and releases all its sequences."""
        self._deliver.pop(session_id, None)
        for key in [key for key in self._sequences if key[0] == session_id]:
            self._drop(self._sequences[key])

    def open_sequence(self, session_id: int, command: OpenCommand) -> None:
        """Takes up a sequence; an older placement of it is released."""
        held = self._sequences.get((session_id, command.sequence_id))
        if held is not None:
            if held.epoch >= command.epoch:
                self.stats.num_stale_items += 1
                return
            self._drop(held)
        refusal = command.refusal
        if refusal is None and len(command.token_ids) > self._context_size:
            detail = f"{len(command.token_ids)} tokens exceed {self._context_size}"
            refusal = (Status.TOO_LARGE, detail)
        if refusal is None:
            refusal = self._find_overload(len(command.token_ids))
            self.stats.num_refused += refusal is not None
        self._num_opened += 1
        self._sequences[session_id, command.sequence_id] = Sequence(
            session_id=session_id,
            sequence_id=command.sequence_id,
            epoch=command.epoch,
            token_ids=command.token_ids,
            num_prompt_tokens=command.num_prompt_tokens,
            params=command.params,
            keys=command.keys,
            kv=self._make_kv(session_id, command),
            arrival=self._num_opened,
            refusal=refusal,
        )
        if refusal is not None:
            self._free(self._sequences[session_id, command.sequence_id])

    def _make_kv(self, session_id: int, command: OpenCommand) -> SequenceKV:
        """Shares the KV of the sequence that is forked, as far as it goes; else begins empty."""
        parent = None
        if command.fork_of is not None:
            parent = self._sequences.get((session_id, command.fork_of))
        if parent is None or not parent.kv.is_proven or parent.kv.salt != command.cache_salt:
            return SequenceKV(self._pool, command.cache_salt)
        num_shared = min(parent.kv.num_computed_tokens, len(command.token_ids) - 1)
        if parent.token_ids[:num_shared] != command.token_ids[:num_shared]:
            return SequenceKV(self._pool, command.cache_salt)
        return parent.kv.fork(max(0, num_shared))

    def _find_overload(self, num_tokens: int) -> tuple[Status, str] | None:
        """Says why a sequence cannot be taken up now; None when it can.

        Sequences wait for blocks without harm, but not any number of them.
        """
        admitted = [held for held in self._sequences.values() if held.refusal is None]
        if len(admitted) >= self._max_sequences:
            return Status.EXHAUSTED, f"{len(admitted)} sequences are in progress"
        num_needed = self._pool.num_blocks_for(num_tokens) + sum(
            self._pool.num_blocks_for(len(held.token_ids)) for held in admitted
        )
        if admitted and num_needed > self._max_needed_blocks:
            return Status.EXHAUSTED, (
                f"sequences in progress need {num_needed} KV blocks of {self._pool.num_blocks}"
            )
        return None

    def release_sequence(self, session_id: int, command: ReleaseCommand) -> None:
        """Lets a sequence go and frees its blocks."""
        sequence = self._sequences.get((session_id, command.sequence_id))
        if sequence is not None and command.epoch >= sequence.epoch:
            self._retain(sequence, min(command.retained_length, len(sequence.token_ids)))
            self._drop(sequence)

    def submit(self, session_id: int, item: VerifyItem) -> None:
        """Takes an item; it is answered by a later step, or at once if it cannot be."""
        sequence = self._sequences.get((session_id, item.sequence_id))
        fault = self._find_fault(sequence, item)
        if fault is not None:
            self.stats.num_stale_items += fault[0] is Status.STALE
            self._answer(session_id, [ItemOutcome(item, *fault)], step_index=0)
            return
        assert sequence is not None
        if item.base_length + len(item.proposal.token_ids) > self._context_size:
            item = replace(item, proposal=Proposal())
        self._retain(sequence, item.base_length)
        self._num_waiting += sequence.item is None
        self._expected.discard((session_id, item.sequence_id))
        self._end_span(sequence)
        sequence.item = item
        sequence.last_round_index = item.round_index
        sequence.first_step_s = None
        if item.traceparent:
            sequence.span = self._tracing.start_span(
                names.TARGET_VERIFY,
                parent=item.traceparent,
                attributes={
                    names.ROUND_INDEX: item.round_index,
                    names.BASE_LENGTH: item.base_length,
                    names.NUM_DRAFT_TOKENS: len(item.proposal.token_ids),
                },
            )

    @staticmethod
    def _retain(sequence: Sequence, num_tokens: int) -> None:
        """Learns what was retained of the last round: the rest goes, full blocks are cached."""
        del sequence.token_ids[num_tokens:]
        sequence.digest.rollback(num_tokens)
        sequence.kv.rollback(max(0, num_tokens - 1))
        sequence.kv.remember(sequence.token_ids, num_tokens)

    def _find_fault(self, sequence: Sequence | None, item: VerifyItem) -> tuple[Status, str] | None:
        """Says why an item cannot be verified; None when it can."""
        if sequence is None or item.epoch > sequence.epoch:
            return Status.UNKNOWN_SEQUENCE, f"sequence {item.sequence_id} is not held"
        if (item.epoch, item.round_index) < (sequence.epoch, sequence.last_round_index):
            return Status.STALE, f"round {item.round_index} of epoch {item.epoch} is over"
        if sequence.refusal is not None:
            return sequence.refusal
        if not 1 <= item.base_length <= len(sequence.token_ids):
            detail = f"base_length {item.base_length} is not in 1..{len(sequence.token_ids)}"
            return Status.MISMATCH, detail
        if item.base_length > self._context_size:
            return Status.TOO_LARGE, f"{item.base_length} tokens exceed {self._context_size}"
        if sequence.digest.digest(sequence.token_ids, item.base_length) != item.digest:
            return Status.MISMATCH, f"digest differs at base_length {item.base_length}"
        return None

    # Steps, on the engine thread.

    @property
    def has_work(self) -> bool:
        """Whether an item waits."""
        return self._num_waiting > 0

    def patience_s(self) -> float:
        """Waits, briefly, for the sequences that the last step answered."""
        return self._patience_ends_s - time.monotonic() if self._expected else 0.0

    def step(self) -> None:
        """Schedules, runs, commits or rolls back, and answers."""
        started_s = time.monotonic()
        self._expire(started_s)
        works = self._scheduler.schedule(self._sequences.values())
        if not works:
            # What holds the blocks goes on with its next item: let it come.
            time.sleep(_NO_ROOM_PAUSE_S)
            return
        self._step_works = works
        self.stats.num_steps += 1
        for work in works:
            if work.sequence.first_step_s is None:
                work.sequence.first_step_s = started_s
        span = self._start_step_span(works)
        try:
            results = self._runner.run(works)
        finally:
            span.end()
        step_s = time.monotonic() - started_s
        self.stats.step_s += step_s
        step_ms = step_s * 1e3
        outcomes = defaultdict(list)
        for work, result in zip(works, results, strict=True):
            outcome = self._finish(work, result, step_ms)
            if outcome is not None:
                outcomes[work.sequence.session_id].append(outcome)
        self._step_works = []
        self._expected = {
            (work.sequence.session_id, work.sequence.sequence_id)
            for work in works
            if work.sequence.item is None
        }
        self._patience_ends_s = time.monotonic() + _PATIENCE * step_ms / 1e3
        for session_id, answers in outcomes.items():
            self._answer(session_id, answers, self.stats.num_steps)
        if self._check_every_step:
            self.check_integrity()

    def _finish(
        self, work: Work, result: VerifyResult | NonFiniteLogitsError | None, step_ms: float
    ) -> ItemOutcome | None:
        """Commits or rolls back one work; returns the answer if its item is decided."""
        sequence, item = work.sequence, work.sequence.item
        assert item is not None
        kv = sequence.kv
        kv.num_computed_tokens += work.num_committed_rows
        if result is None:
            kv.is_proven = False
            return None
        if isinstance(result, NonFiniteLogitsError):
            self._clear(kv.discard())
            if item.proposal.token_ids:
                # The fault may be a drafted token's: computed again without drafts.
                sequence.item = replace(item, proposal=Proposal())
                return None
            return self._end_item(sequence, Status.NON_FINITE_LOGITS, "logits are not finite")
        kv.is_proven = True
        # KV is valid for the pending token and the accepted drafts; the token
        # after them is the new pending one.
        kv.num_computed_tokens += result.num_accepted_tokens
        kv.rollback(kv.num_computed_tokens)
        sequence.token_ids += result.output_token_ids
        self.stats.num_redraw_mismatches += result.redraw_mismatch
        assert sequence.first_step_s is not None
        result = replace(
            result,
            queue_ms=(sequence.first_step_s - item.arrival_s) * 1e3,
            step_ms=step_ms,
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )
        if sequence.span is not None:
            sequence.span.set_attribute(names.NUM_ACCEPTED_TOKENS, result.num_accepted_tokens)
            sequence.span.set_attribute(names.QUEUE_MS, result.queue_ms)
        return self._end_item(sequence, Status.OK, result=result)

    def _expire(self, now_s: float) -> None:
        """Answers items whose time is up."""
        for sequence in self._sequences.values():
            item = sequence.item
            if item is not None and item.deadline_s is not None and item.deadline_s <= now_s:
                outcome = self._end_item(sequence, Status.EXPIRED, "its time ran out")
                self._answer(sequence.session_id, [outcome], step_index=0)

    def fail_step(self, error: Exception) -> None:
        """Answers the items of a step that raised; their KV is computed again if asked for."""
        works, self._step_works = self._step_works, []
        for work in works:
            self._clear(work.sequence.kv.discard())
            if work.sequence.item is not None:
                outcome = self._end_item(work.sequence, Status.FAILED, type(error).__name__)
                self._answer(work.sequence.session_id, [outcome], step_index=0)

    def check_integrity(self) -> None:
        """Checks that every block is free or held by exactly one sequence.

        Raises:
            AssertionError: If not.
        """
        sequences = self._sequences.values()
        self._pool.check_integrity(sequence.kv.block_table for sequence in sequences)
        for sequence in sequences:
            num_held = len(sequence.kv.block_table) * self._pool.block_size
            assert sequence.kv.num_computed_tokens <= num_held, "computed tokens without a block"
            assert sequence.kv.num_computed_tokens < max(1, len(sequence.token_ids))
        assert self._num_waiting == sum(sequence.item is not None for sequence in sequences)

    # Ends.

    def _end_item(
        self,
        sequence: Sequence,
        status: Status,
        detail: str = "",
        result: VerifyResult | None = None,
    ) -> ItemOutcome:
        item = sequence.item
        assert item is not None
        sequence.item = None
        sequence.idle_since_s = time.monotonic()
        self._num_waiting -= 1
        self._end_span(sequence, status)
        return ItemOutcome(item, status, detail, result)

    def _free(self, sequence: Sequence) -> None:
        self._clear(sequence.kv.release())

    def _clear(self, block_ids: list[int]) -> None:
        """Clears freed blocks; a NaN in one would spread through masked reads."""
        if block_ids:
            self._model.kv.clear(block_ids)

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.session_id, sequence.sequence_id]
        self._expected.discard((sequence.session_id, sequence.sequence_id))
        self._num_waiting -= sequence.item is not None
        sequence.item = None
        self._end_span(sequence)
        self._free(sequence)

    def _end_span(self, sequence: Sequence, status: Status = Status.STALE) -> None:
        if sequence.span is not None:
            sequence.span.set_attribute(names.STATUS, status.value)
            sequence.span.end()
            sequence.span = None

    def _answer(self, session_id: int, outcomes: list[ItemOutcome], step_index: int) -> None:
        deliver = self._deliver.get(session_id)
        if deliver is not None:
            deliver(outcomes, step_index)

    def _start_step_span(self, works: list[Work]) -> Span:
        num_tokens = sum(work.num_rows for work in works)
        num_prefill = sum(work.num_committed_rows for work in works if work.num_committed_rows > 1)
        self.stats.num_tokens += num_tokens
        self.stats.max_batch_size = max(self.stats.max_batch_size, len(works))
        _log.debug(
            "step",
            step_index=self.stats.num_steps,
            batch_size=len(works),
            num_tokens=num_tokens,
            num_prefill_tokens=num_prefill,
            num_free_blocks=self._pool.num_free,
        )
        return self._tracing.start_step(
            names.TARGET_STEP,
            [work.sequence.span for work in works if work.sequence.span is not None],
            {
                names.STEP_INDEX: self.stats.num_steps,
                names.BATCH_SIZE: len(works),
                names.NUM_TOKENS: num_tokens,
                names.NUM_PREFILL_TOKENS: num_prefill,
            },
        )
