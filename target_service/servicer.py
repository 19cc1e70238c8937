"""The target's RPCs: translates, and leaves the computing to the engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from specdec.errors import InvalidArgumentError, UnavailableError
from specdec.rpc.session import pack, serve_session
from specdec.types import MAX_DRAFT_TOKENS, Proposal, SamplingParams
from specdec.v1 import target_pb2, target_pb2_grpc
from specdec.wire import (
    check_token_ids,
    distribution_from_proto,
    keys_from_proto,
    logprobs_to_proto,
    opening_params,
    source_to_proto,
)
from target_service.engine import TargetEngine
from target_service.sequence import ItemOutcome, OpenCommand, ReleaseCommand, Status, VerifyItem

_STATUSES = {
    Status.OK: target_pb2.VERIFY_STATUS_OK,
    Status.STALE: target_pb2.VERIFY_STATUS_STALE,
    Status.UNKNOWN_SEQUENCE: target_pb2.VERIFY_STATUS_UNKNOWN_SEQUENCE,
    Status.MISMATCH: target_pb2.VERIFY_STATUS_MISMATCH,
    Status.INVALID: target_pb2.VERIFY_STATUS_INVALID,
    Status.TOO_LARGE: target_pb2.VERIFY_STATUS_TOO_LARGE,
    Status.EXPIRED: target_pb2.VERIFY_STATUS_EXPIRED,
    Status.NON_FINITE_LOGITS: target_pb2.VERIFY_STATUS_NON_FINITE_LOGITS,
    Status.FAILED: target_pb2.VERIFY_STATUS_FAILED,
    Status.EXHAUSTED: target_pb2.VERIFY_STATUS_EXHAUSTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What this target serves; fixed once the model is loaded."""

    model: str
    fingerprint: str
    token_table_digest: str
    vocab_size: int
    context_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    num_blocks: int


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves the Verify stream and the target's facts."""

    _engine: TargetEngine
    _facts: TargetFacts

    def __init__(self) -> None:
        """Refuses every call until `serve`."""
        self._session_ids = itertools.count(1)
        self._refusal: UnavailableError | None = UnavailableError(
            "the target is loading its model", reason="LOADING"
        )

    def serve(self, engine: TargetEngine, facts: TargetFacts) -> None:
        """Begins to serve a started engine."""
        self._engine, self._facts, self._refusal = engine, facts, None

    def drain(self) -> None:
        """Refuses new sessions from now on."""
        self._refusal = UnavailableError("the target is shutting down", reason="DRAINING")

    def _check_serving(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> None:
        """One orchestrator's session: commands in, each step's results out."""
        self._check_serving()
        session_id = next(self._session_ids)

        def begin(send: Callable[[target_pb2.VerifyResponse], None]) -> None:
            # Delivered on the engine thread: encoding there keeps the event loop free.
            def deliver(outcomes: list[ItemOutcome], step_index: int) -> None:
                new = partial(target_pb2.VerifyResponse, step_index=step_index)
                for response in pack(map(_result, outcomes), new, "results"):
                    send(response)

            self._engine.post(partial(self._engine.open_session, session_id, deliver))

        await serve_session(
            request_iterator,
            context.write,
            begin=begin,
            take=partial(self._post, session_id),
            end=lambda: self._engine.post(partial(self._engine.close_session, session_id)),
        )

    def _post(self, session_id: int, request: target_pb2.VerifyRequest) -> None:
        """Hands one message's commands to the engine, as one command."""
        opens = [self._open_command(message) for message in request.opens]
        items = [self._item(message) for message in request.items]
        releases = [
            ReleaseCommand(message.sequence_id, message.epoch, message.retained_length)
            for message in request.releases
        ]

        def apply() -> None:
            for opening in opens:
                self._engine.open_sequence(session_id, opening)
            for item in items:
                self._engine.submit(session_id, item)
            for release in releases:
                self._engine.release_sequence(session_id, release)

        self._engine.post(apply)

    def _open_command(self, message: target_pb2.OpenSequence) -> OpenCommand:
        refusal = None
        params = SamplingParams()
        try:
            params = opening_params(message, self._facts.vocab_size)
            if not message.token_ids:
                raise InvalidArgumentError("token_ids", "must not be empty")
            check_token_ids("token_ids", message.token_ids, self._facts.vocab_size)
            if message.hidden_states:
                raise InvalidArgumentError("hidden_states", "is not supported yet")
        except InvalidArgumentError as error:
            refusal = (Status.INVALID, error.message)
        fingerprint = message.model_fingerprint
        if fingerprint and fingerprint != self._facts.fingerprint:
            refusal = (Status.FAILED, f"model_fingerprint {fingerprint} is not this target's")
        return OpenCommand(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            token_ids=list(message.token_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            params=params,
            keys=keys_from_proto(message.keys),
            cache_salt=message.cache_salt,
            fork_of=message.fork_of if message.HasField("fork_of") else None,
            refusal=refusal,
        )

    def _item(self, message: target_pb2.VerifyItem) -> VerifyItem:
        now_s = time.monotonic()
        return VerifyItem(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            round_index=message.round_index,
            base_length=message.base_length,
            digest=message.digest,
            proposal=self._proposal(message),
            deadline_s=(
                now_s + message.remaining_ms / 1e3 if message.HasField("remaining_ms") else None
            ),
            traceparent=message.traceparent,
            arrival_s=now_s,
        )

    def _proposal(self, message: target_pb2.VerifyItem) -> Proposal:
        """Reads the proposal; a malformed one is set aside whole, as a draft is a hint."""
        try:
            if message.parent_indices or len(message.draft_token_ids) > MAX_DRAFT_TOKENS:
                return Proposal()
            if len(message.distributions) not in (0, len(message.draft_token_ids)):
                return Proposal()
            vocab_size = self._facts.vocab_size
            check_token_ids("draft_token_ids", message.draft_token_ids, vocab_size)
            return Proposal(
                tuple(message.draft_token_ids),
                tuple(distribution_from_proto(q, vocab_size) for q in message.distributions),
            )
        except InvalidArgumentError:
            return Proposal()

    async def GetTargetInfo(
        self,
        request: target_pb2.GetTargetInfoRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.GetTargetInfoRequest, target_pb2.GetTargetInfoResponse
        ],
    ) -> target_pb2.GetTargetInfoResponse:
        """The model's facts and the present load."""
        del request, context
        self._check_serving()
        facts, engine = self._facts, self._engine
        return target_pb2.GetTargetInfoResponse(
            model=facts.model,
            fingerprint=facts.fingerprint,
            token_table_digest=facts.token_table_digest,
            vocab_size=facts.vocab_size,
            context_size=facts.context_size,
            eos_token_ids=facts.eos_token_ids,
            dtype=facts.dtype,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            num_free_blocks=engine.num_free_blocks,
            num_sequences=engine.num_sequences,
            num_sessions=engine.num_sessions,
            num_steps=engine.stats.num_steps,
            num_redraw_mismatches=engine.stats.num_redraw_mismatches,
            num_preemptions=engine.num_preemptions,
            num_stale_items=engine.stats.num_stale_items,
            max_batch_size=engine.stats.max_batch_size,
        )


def _result(outcome: ItemOutcome) -> target_pb2.VerifyResult:
    item = outcome.item
    message = target_pb2.VerifyResult(
        sequence_id=item.sequence_id,
        epoch=item.epoch,
        round_index=item.round_index,
        base_length=item.base_length,
        status=_STATUSES[outcome.status],
        detail=outcome.detail,
    )
    result = outcome.result
    if result is not None:
        message.output_token_ids.extend(result.output_token_ids)
        message.sources.extend(map(source_to_proto, result.sources))
        message.logprobs.extend(map(logprobs_to_proto, result.logprobs))
        message.num_accepted_tokens = result.num_accepted_tokens
        message.num_draft_tokens = result.num_draft_tokens
        message.redraw_mismatch = result.redraw_mismatch
        message.queue_ms = result.queue_ms
        message.step_ms = result.step_ms
        message.cached_prompt_tokens = result.num_cached_tokens
    return message
