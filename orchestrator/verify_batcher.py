"""Batches what is ready to be verified, and brings back each sequence's result.

Items that become ready in one tick for one target travel as one message. Each
result is matched to its item by (sequence, epoch, round).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container
from dataclasses import dataclass

import structlog

from orchestrator.pool import Pool
from orchestrator.sequence import Sequence
from orchestrator.target_client import TargetClient
from orchestrator.target_router import TargetRouter
from specdec.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing
from specdec.types import Proposal, VerifyResult
from specdec.v1 import target_pb2
from specdec.wire import (
    bad_words_to_proto,
    distribution_to_proto,
    keys_to_proto,
    logprobs_from_proto,
    sampling_to_proto,
)

_log = structlog.get_logger(__name__)

# A sequence the target does not know, or knows differently, is opened again with
# the full token list; after that it must fit.
_MAX_REOPENINGS = 2
_RETRY_AFTER_MS = 1_000
_FIELD_BYTES = 8
"""Most bytes of a field's tag and length."""
_REOPEN = frozenset(
    {
        target_pb2.VERIFY_STATUS_UNKNOWN_SEQUENCE,
        target_pb2.VERIFY_STATUS_MISMATCH,
        target_pb2.VERIFY_STATUS_STALE,
    }
)


class _TargetLostError(Exception):
    """The target was lost before it answered."""


@dataclass(slots=True)
class _Placement:
    """Where a sequence is, and how the target there knows it."""

    client: TargetClient | None = None
    epoch: int = 0
    is_open: bool = False


class VerifyBatcher:
    """Verifies rounds at the targets of a pool; a sequence stays where it was placed."""

    def __init__(self, pool: Pool[TargetClient], router: TargetRouter, tracing: Tracing) -> None:
        """Takes a pool whose clients are given to `adopt`."""
        self._pool = pool
        self._router = router
        self._tracing = tracing
        self._placements: dict[int, _Placement] = {}
        self._waiting: dict[tuple[int, int, int], asyncio.Future[target_pb2.VerifyResult]] = {}

    def adopt(self, client: TargetClient) -> None:
        """Takes over a client's results."""
        client.handle_result = self._on_result
        client.handle_lost = self._on_lost

    async def verify(self, sequence: Sequence, proposal: Proposal) -> VerifyResult:
        """Verifies one round; on another target if the sequence's is lost.

        Args:
            sequence: Whose round it is.
            proposal: The drafts; none is a plain decode.

        Returns:
            What the target decided.

        Raises:
            ServiceError: If no target can decide it.
        """
        span = self._tracing.start_span(
            names.VERIFY,
            parent=sequence.span,
            attributes={
                names.ROUND_INDEX: sequence.round_index,
                names.BASE_LENGTH: sequence.base_length,
                names.NUM_DRAFT_TOKENS: len(proposal.token_ids),
            },
        )
        try:
            traceparent = self._tracing.traceparent_of(span)
            message = await self._submit(sequence, proposal, traceparent)
            for _ in range(_MAX_REOPENINGS):
                if message.status not in _REOPEN:
                    break
                self._placements[sequence.sequence_id].is_open = False
                message = await self._submit(sequence, proposal, traceparent)
            result: VerifyResult = _result(message)
            span.set_attribute(names.NUM_ACCEPTED_TOKENS, result.num_accepted_tokens)
            return result
        finally:
            span.end()

    async def _submit(
        self, sequence: Sequence, proposal: Proposal, traceparent: str
    ) -> target_pb2.VerifyResult:
        """Gets one item's result; from another target if one is lost, or too busy to begin."""
        busy: set[str] = set()
        while True:
            placement = self._place(sequence, busy)
            try:
                message = await self._ask(placement, sequence, proposal, traceparent)
            except _TargetLostError:
                _log.warning("target lost", sequence_id=sequence.sequence_id)
                continue
            if message.status == target_pb2.VERIFY_STATUS_EXHAUSTED:
                assert placement.client is not None
                busy.add(placement.client.address)
                if any(client.address not in busy for client in self._pool.usable()):
                    self._leave(placement, sequence, target_pb2.RELEASE_REASON_FAILED)
                    continue
            return message

    def _place(self, sequence: Sequence, busy: Container[str]) -> _Placement:
        """Where the sequence is; it is placed first, where it is not busy, if it is nowhere."""
        placement = self._placements.setdefault(sequence.sequence_id, _Placement())
        if placement.client is not None:
            return placement
        usable = [client for client in self._pool.usable() if client.address not in busy]
        if not usable:
            is_lost = placement.epoch > 0
            raise UnavailableError(
                self._pool.refusal or "no target answers",
                reason="TARGET_LOST" if is_lost else "NO_TARGET",
            )
        blocks = sequence.digest.block_hashes(sequence.token_ids, sequence.base_length)
        parent = self._placements.get(sequence.fork_of or 0)
        if parent is not None and parent.client in usable:
            placement.client = parent.client
        else:
            placement.client = self._router.choose(usable, blocks)
        placement.client.place(sequence.base_length)
        self._router.remember(placement.client.address, blocks)
        placement.is_open = False
        return placement

    async def _ask(
        self, placement: _Placement, sequence: Sequence, proposal: Proposal, traceparent: str
    ) -> target_pb2.VerifyResult:
        """Sends one item, after an opening if needed, and waits for its result."""
        assert placement.client is not None
        opens = []
        if not placement.is_open:
            placement.is_open = True
            placement.epoch += 1
            opens.append(_opening(sequence, placement.epoch))
            if opens[0].ByteSize() > placement.client.max_part_bytes:
                placement.is_open = False
                detail = f"has {sequence.base_length} tokens, too many for one message"
                raise InvalidArgumentError("input", detail, reason="TOO_LARGE")
        item = target_pb2.VerifyItem(
            sequence_id=sequence.sequence_id,
            epoch=placement.epoch,
            round_index=sequence.round_index,
            base_length=sequence.base_length,
            digest=sequence.base_digest(),
            draft_token_ids=proposal.token_ids,
            traceparent=traceparent,
        )
        _add_distributions(item, proposal, placement.client.max_part_bytes)
        if sequence.deadline_s is not None:
            item.remaining_ms = max(0, int((sequence.deadline_s - time.monotonic()) * 1e3))
        key = (sequence.sequence_id, placement.epoch, sequence.round_index)
        future: asyncio.Future[target_pb2.VerifyResult] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        placement.client.send(opens=opens, items=[item])
        try:
            return await future
        finally:
            self._waiting.pop(key, None)

    def release(self, sequence: Sequence, reason: target_pb2.ReleaseReason) -> None:
        """Lets a sequence go at its target; a round in progress there ends with it.

        Args:
            sequence: With the tokens that were retained.
            reason: Why it ended.
        """
        placement = self._placements.pop(sequence.sequence_id, None)
        if placement is None or placement.client is None:
            return
        # The next turn of a conversation finds its KV there.
        blocks = sequence.digest.block_hashes(sequence.token_ids, sequence.base_length)
        self._router.remember(placement.client.address, blocks)
        self._leave(placement, sequence, reason)

    @staticmethod
    def _leave(placement: _Placement, sequence: Sequence, reason: target_pb2.ReleaseReason) -> None:
        """Takes a sequence off its target."""
        client, placement.client = placement.client, None
        assert client is not None
        client.displace()
        client.send(
            releases=[
                target_pb2.ReleaseSequence(
                    sequence_id=sequence.sequence_id,
                    epoch=placement.epoch,
                    retained_length=sequence.base_length,
                    reason=reason,
                )
            ]
        )

    def _on_result(self, message: target_pb2.VerifyResult) -> None:
        key = (message.sequence_id, message.epoch, message.round_index)
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_result(message)

    def _on_lost(self, client: TargetClient) -> None:
        lost = {
            sequence_id
            for sequence_id, placement in self._placements.items()
            if placement.client is client
        }
        for sequence_id in lost:
            self._placements[sequence_id].client = None
            client.displace()
        for (sequence_id, *_), future in self._waiting.items():
            if sequence_id in lost and not future.done():
                future.set_exception(_TargetLostError())


def _add_distributions(
    item: target_pb2.VerifyItem, proposal: Proposal, max_item_bytes: int
) -> None:
    """Adds the q's that fit, and cuts the drafts behind them.

    Whether a draft stays depends on the sizes of its own and earlier q's, which were
    known before it was drawn: so cutting here bends nothing.
    """
    num_bytes = item.ByteSize()
    for index, distribution in enumerate(proposal.draft_probs):
        message = distribution_to_proto(distribution)
        num_bytes += message.ByteSize() + _FIELD_BYTES
        if num_bytes > max_item_bytes:
            del item.draft_token_ids[index:]
            return
        item.distributions.append(message)


def _opening(sequence: Sequence, epoch: int) -> target_pb2.OpenSequence:
    return target_pb2.OpenSequence(
        sequence_id=sequence.sequence_id,
        epoch=epoch,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sampling_to_proto(sequence.params),
        keys=keys_to_proto(sequence.keys),
        fork_of=sequence.fork_of,
        end_token_ids=sequence.params.end_token_ids,
        bad_word_token_ids=bad_words_to_proto(sequence.params),
    )


def _result(message: target_pb2.VerifyResult) -> VerifyResult:
    """Reads a result; any status but OK is an error of this request alone."""
    if message.status != target_pb2.VERIFY_STATUS_OK:
        raise _error(message)
    return VerifyResult(
        output_token_ids=tuple(message.output_token_ids),
        num_accepted_tokens=message.num_accepted_tokens,
        num_draft_tokens=message.num_draft_tokens,
        redraw_mismatch=message.redraw_mismatch,
        queue_ms=message.queue_ms,
        step_ms=message.step_ms,
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)),
        num_cached_tokens=message.cached_prompt_tokens,
    )


def _error(message: target_pb2.VerifyResult) -> ServiceError:
    status = message.status
    if status == target_pb2.VERIFY_STATUS_EXPIRED:
        return DeadlineExceededError("the deadline passed", reason="DEADLINE_EXCEEDED")
    if status == target_pb2.VERIFY_STATUS_TOO_LARGE:
        return InvalidArgumentError("input", message.detail, reason="TOO_LARGE")
    if status == target_pb2.VERIFY_STATUS_EXHAUSTED:
        return ResourceExhaustedError(
            message.detail, reason="TARGET_BUSY", retry_after_ms=_RETRY_AFTER_MS
        )
    if status == target_pb2.VERIFY_STATUS_NON_FINITE_LOGITS:
        return InternalError("the model's logits are not finite", reason="NON_FINITE_LOGITS")
    name = target_pb2.VerifyStatus.Name(status).removeprefix("VERIFY_STATUS_")
    return InternalError(f"the target could not verify: {message.detail}", reason=f"TARGET_{name}")
