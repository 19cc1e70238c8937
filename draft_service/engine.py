"""The draft service's engine: commits in, proposed tokens out, step by step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import structlog
from opentelemetry.trace import INVALID_SPAN, Span

from draft_service.drafter import (
    Drafted,
    Drafter,
    DraftSequence,
    OpenCommand,
    ProposeItem,
    Status,
)
from specdec.engine_thread import Engine
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing
from specdec.types import DraftDistribution

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens added to one proposal, or the answer that there will be none."""

    item: ProposeItem
    start_index: int
    token_ids: list[int]
    draft_probs: list[DraftDistribution]
    is_final: bool
    status: Status = Status.OK
    detail: str = ""


Deliver = Callable[[list[Chunk]], None]
"""Takes what one draft step added for one session; called on the engine thread."""


class DraftEngine(Engine):
    """Owns the drafters and every draft sequence."""

    def __init__(self, drafters: Seq[Drafter], *, max_batch_size: int, tracing: Tracing) -> None:
        """Makes the engine, not started.

        Args:
            drafters: What can be asked for, by name.
            max_batch_size: Most sequences of a step.
            tracing: Where spans go.
        """
        owns_device = any(drafter.owns_device for drafter in drafters)
        super().__init__("draft-engine", owns_device=owns_device)
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._max_batch_size = max_batch_size
        self._tracing = tracing
        self._sequences: dict[tuple[int, int], DraftSequence] = {}
        self._deliver: dict[int, Deliver] = {}
        # Sequences a step may do something for, by key, the longest waiting first.
        self._active: dict[tuple[int, int], DraftSequence] = {}
        self._step_sequences: list[DraftSequence] = []
        self.num_steps = 0

    # Gauges, read from any thread.

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    @property
    def num_sessions(self) -> int:
        """Sessions open."""
        return len(self._deliver)

    # Commands, on the engine thread.

    def open_session(self, session_id: int, deliver: Deliver) -> None:
        """Begins a session; its chunks go to `deliver`."""
        self._deliver[session_id] = deliver

    def close_session(self, session_id: int) -> None:
        """Ends a session and releases all its sequences."""
        self._deliver.pop(session_id, None)
        for key in [key for key in self._sequences if key[0] == session_id]:
            self._drop(key)

    def open_sequence(self, session_id: int, command: OpenCommand) -> None:
        """Takes up a sequence; an older placement of it is released."""
        key = (session_id, command.sequence_id)
        held = self._sequences.get(key)
        if held is not None:
            if held.opening.epoch >= command.epoch:
                return
            self._drop(key)
        sequence = DraftSequence(session_id, command, list(command.token_ids))
        self._sequences[key] = sequence
        if command.refusal is None:
            self._drafter_of(sequence).open(sequence)
            self._update_active(key)

    def release_sequence(self, session_id: int, sequence_id: int, epoch: int) -> None:
        """Lets a sequence go."""
        sequence = self._sequences.get((session_id, sequence_id))
        if sequence is not None and epoch >= sequence.opening.epoch:
            self._drop((session_id, sequence_id))

    def submit(self, session_id: int, item: ProposeItem) -> None:
        """Takes a commit and begins the proposal wanted on top of it."""
        key = (session_id, item.sequence_id)
        sequence = self._sequences.get(key)
        fault = self._find_fault(sequence, item)
        if fault is not None:
            self._answer(session_id, [Chunk(item, 0, [], [], True, *fault)])
            return
        assert sequence is not None
        start = item.base_length - len(item.token_ids)
        self._drafter_of(sequence).commit(sequence, item.token_ids, start)
        sequence.digest.rollback(start)
        sequence.token_ids[start:] = item.token_ids
        sequence.drafted.clear()
        self._end_span(sequence)
        sequence.item = item
        sequence.last_round_index = item.round_index
        if sequence.digest.digest(sequence.token_ids, item.base_length) != item.digest:
            self._finish(
                sequence, Drafted(sequence, [], [], True, Status.MISMATCH, "digest differs")
            )
        elif item.num_speculative_tokens == 0:
            self._finish(sequence, Drafted(sequence, [], [], is_final=True))
        elif item.traceparent:
            sequence.span = self._tracing.start_span(
                names.PROPOSE,
                parent=item.traceparent,
                attributes={
                    names.DRAFTER: sequence.opening.drafter,
                    names.ROUND_INDEX: item.round_index,
                    names.BASE_LENGTH: item.base_length,
                    names.NUM_SPECULATIVE_TOKENS: item.num_speculative_tokens,
                },
            )
        self._update_active(key)

    def _find_fault(
        self, sequence: DraftSequence | None, item: ProposeItem
    ) -> tuple[Status, str] | None:
        """Says why an item cannot be served; None when it can."""
        if sequence is None or item.epoch > sequence.opening.epoch:
            return Status.UNKNOWN_SEQUENCE, f"sequence {item.sequence_id} is not held"
        held = (sequence.opening.epoch, sequence.last_round_index)
        if (item.epoch, item.round_index) < held:
            return Status.STALE, f"round {item.round_index} of epoch {item.epoch} is over"
        if sequence.opening.refusal is not None:
            return sequence.opening.refusal
        start = item.base_length - len(item.token_ids)
        if not (0 <= start <= len(sequence.token_ids) and item.base_length > 0):
            detail = f"tokens from {start} on do not follow {len(sequence.token_ids)} held"
            return Status.MISMATCH, detail
        return None

    # Steps, on the engine thread.

    @property
    def has_work(self) -> bool:
        """Whether a proposal is wanted or a prompt waits."""
        return bool(self._active)

    def step(self) -> None:
        """Ends late proposals, runs one draft step per drafter, and answers."""
        now_s = time.monotonic()
        for sequence in list(self._active.values()):
            if sequence.item is not None and _is_late(sequence.item, now_s):
                self._finish(sequence, Drafted(sequence, [], [], is_final=True))
        # Proposals before prompts; otherwise the longest waiting first.
        waiting = sorted(self._active.values(), key=lambda sequence: sequence.num_wanted == 0)
        batch = waiting[: self._max_batch_size]
        if not batch:
            return
        self.num_steps += 1
        self._step_sequences = batch
        span = self._start_step_span(batch)
        by_drafter = defaultdict(list)
        for sequence in batch:
            by_drafter[sequence.opening.drafter].append(sequence)
        drafted: list[Drafted] = []
        try:
            for name, sequences in by_drafter.items():
                drafted += self.drafters[name].step(sequences)
        finally:
            span.end()
        chunks = defaultdict(list)
        for result in drafted:
            if result.sequence.item is not None:
                chunks[result.sequence.session_id].append(self._advance(result))
        for sequence in batch:
            key = (sequence.session_id, sequence.opening.sequence_id)
            self._active.pop(key, None)  # to the end of the queue
            self._update_active(key)
        self._step_sequences = []
        for session_id, added in chunks.items():
            self._answer(session_id, added)

    def _advance(self, result: Drafted) -> Chunk:
        """Adds a step's tokens to the proposal; ends it when they are the last."""
        sequence, item = result.sequence, result.sequence.item
        assert item is not None
        chunk = Chunk(
            item,
            len(sequence.drafted),
            result.token_ids,
            result.draft_probs,
            result.is_final,
            result.status,
            result.detail,
        )
        sequence.drafted += result.token_ids
        if result.is_final:
            sequence.item = None
            self._end_span(sequence, len(sequence.drafted))
        return chunk

    def _finish(self, sequence: DraftSequence, result: Drafted) -> None:
        """Ends a proposal outside a step."""
        self._answer(sequence.session_id, [self._advance(result)])
        self._update_active((sequence.session_id, sequence.opening.sequence_id))

    def fail_step(self, error: Exception) -> None:
        """Ends the proposals of a step that raised."""
        sequences, self._step_sequences = self._step_sequences, []
        for sequence in sequences:
            self._drafter_of(sequence).fail(sequence)
            if sequence.item is not None:
                detail = type(error).__name__
                self._finish(sequence, Drafted(sequence, [], [], True, Status.FAILED, detail))
            # A prompt that fails is not tried again before it is asked for.
            self._active.pop((sequence.session_id, sequence.opening.sequence_id), None)

    # Helpers.

    def _drafter_of(self, sequence: DraftSequence) -> Drafter:
        return self.drafters[sequence.opening.drafter]

    def _update_active(self, key: tuple[int, int]) -> None:
        sequence = self._sequences.get(key)
        if sequence is None or sequence.opening.refusal is not None:
            self._active.pop(key, None)
        elif sequence.num_wanted > 0 or self._drafter_of(sequence).wants_step(sequence):
            self._active.setdefault(key, sequence)
        else:
            self._active.pop(key, None)

    def _drop(self, key: tuple[int, int]) -> None:
        sequence = self._sequences.pop(key)
        self._active.pop(key, None)
        self._end_span(sequence)
        if sequence.opening.refusal is None:
            self._drafter_of(sequence).release(sequence)

    def _end_span(self, sequence: DraftSequence, num_draft_tokens: int | None = None) -> None:
        if sequence.span is not None:
            if num_draft_tokens is not None:
                sequence.span.set_attribute(names.NUM_DRAFT_TOKENS, num_draft_tokens)
            sequence.span.end()
            sequence.span = None

    def _answer(self, session_id: int, chunks: list[Chunk]) -> None:
        deliver = self._deliver.get(session_id)
        if deliver is not None:
            deliver(chunks)

    def _start_step_span(self, batch: list[DraftSequence]) -> Span:
        if not any(self._drafter_of(sequence).owns_device for sequence in batch):
            return INVALID_SPAN
        _log.debug("draft step", step_index=self.num_steps, batch_size=len(batch))
        return self._tracing.start_step(
            names.DRAFT_STEP,
            [sequence.span for sequence in batch if sequence.span is not None],
            {names.STEP_INDEX: self.num_steps, names.BATCH_SIZE: len(batch)},
        )


def _is_late(item: ProposeItem, now_s: float) -> bool:
    return item.deadline_s is not None and item.deadline_s <= now_s
