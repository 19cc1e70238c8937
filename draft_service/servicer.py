"""The draft service's RPCs: translates, and leaves the drafting to the engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from draft_service.drafter import OpenCommand, ProposeItem, Status
from draft_service.engine import Chunk, DraftEngine
from specdec.errors import InvalidArgumentError, UnavailableError
from specdec.paged.block_pool import BlockPool
from specdec.rpc.session import pack, serve_session
from specdec.types import MAX_DRAFT_TOKENS, SamplingParams
from specdec.v1 import draft_pb2, draft_pb2_grpc, tensor_pb2
from specdec.wire import (
    ACCEPTANCES_TO_PROTO,
    check_token_ids,
    distribution_to_proto,
    opening_params,
)

_STATUSES = {
    Status.OK: draft_pb2.PROPOSE_STATUS_OK,
    Status.STALE: draft_pb2.PROPOSE_STATUS_STALE,
    Status.UNKNOWN_SEQUENCE: draft_pb2.PROPOSE_STATUS_UNKNOWN_SEQUENCE,
    Status.MISMATCH: draft_pb2.PROPOSE_STATUS_MISMATCH,
    Status.INVALID: draft_pb2.PROPOSE_STATUS_INVALID,
    Status.EXHAUSTED: draft_pb2.PROPOSE_STATUS_EXHAUSTED,
    Status.FAILED: draft_pb2.PROPOSE_STATUS_FAILED,
}
_ACCEPTANCES = {proto: acceptance for acceptance, proto in ACCEPTANCES_TO_PROTO.items()}
# Ids of a service without a model are bounded by their type alone.
_ANY_VOCAB_SIZE = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What this service offers; fixed once the model is loaded."""

    drafters: tuple[str, ...]
    """Names, the default first."""
    model: str = ""
    token_table_digest: str = ""
    vocab_size: int = _ANY_VOCAB_SIZE
    context_size: int = 0
    pool: BlockPool | None = None


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves the Propose stream and the drafters' facts."""

    _engine: DraftEngine
    _facts: DraftFacts

    def __init__(self) -> None:
        """Refuses every call until `serve`."""
        self._session_ids = itertools.count(1)
        self._refusal: UnavailableError | None = UnavailableError(
            "the draft service is loading its model", reason="LOADING"
        )

    def serve(self, engine: DraftEngine, facts: DraftFacts) -> None:
        """Begins to serve a started engine."""
        self._engine, self._facts, self._refusal = engine, facts, None

    def drain(self) -> None:
        """Refuses new sessions from now on."""
        self._refusal = UnavailableError("the draft service is shutting down", reason="DRAINING")

    def _check_serving(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> None:
        """One orchestrator's session: commits in, each draft step's tokens out."""
        self._check_serving()
        session_id = next(self._session_ids)

        def begin(send: Callable[[draft_pb2.ProposeResponse], None]) -> None:
            # Delivered on the engine thread: encoding there keeps the event loop free.
            def deliver(chunks: list[Chunk]) -> None:
                for response in pack(map(_chunk, chunks), draft_pb2.ProposeResponse, "chunks"):
                    send(response)

            self._engine.post(partial(self._engine.open_session, session_id, deliver))

        await serve_session(
            request_iterator,
            context.write,
            begin=begin,
            take=partial(self._post, session_id),
            end=lambda: self._engine.post(partial(self._engine.close_session, session_id)),
        )

    def _post(self, session_id: int, request: draft_pb2.ProposeRequest) -> None:
        """Hands one message's commands to the engine, as one command."""
        opens = [self._open_command(message) for message in request.opens]
        items = [self._item(message) for message in request.items]
        releases = [(message.sequence_id, message.epoch) for message in request.releases]

        def apply() -> None:
            for opening in opens:
                self._engine.open_sequence(session_id, opening)
            for item in items:
                self._engine.submit(session_id, item)
            for sequence_id, epoch in releases:
                self._engine.release_sequence(session_id, sequence_id, epoch)

        self._engine.post(apply)

    def _open_command(self, message: draft_pb2.OpenDraft) -> OpenCommand:
        vocab_size = self._facts.vocab_size
        params = SamplingParams()
        refusal = None
        try:
            params = opening_params(message, vocab_size)
            if message.drafter not in self._facts.drafters:
                offered = ", ".join(self._facts.drafters)
                detail = f"must be one of {offered} (got {message.drafter!r})"
                raise InvalidArgumentError("drafter", detail)
            if not message.token_ids:
                raise InvalidArgumentError("token_ids", "must not be empty")
            check_token_ids("token_ids", message.token_ids, vocab_size)
            if message.acceptance not in _ACCEPTANCES:
                raise InvalidArgumentError("acceptance", f"is unknown (got {message.acceptance})")
            if message.HasField("fork_of"):
                raise InvalidArgumentError("fork_of", "is not supported yet")
        except InvalidArgumentError as error:
            refusal = (Status.INVALID, error.message)
        acceptance = _ACCEPTANCES.get(message.acceptance, next(iter(ACCEPTANCES_TO_PROTO)))
        return OpenCommand(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            token_ids=list(message.token_ids),
            drafter=message.drafter,
            params=params,
            acceptance=acceptance,
            key=message.key,
            is_dense=message.form == tensor_pb2.DISTRIBUTION_FORM_DENSE,
            stop_token_ids=frozenset(message.stop_token_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            refusal=refusal,
        )

    def _item(self, message: draft_pb2.ProposeItem) -> ProposeItem:
        deadline_s = None
        if message.HasField("remaining_ms"):
            deadline_s = time.monotonic() + message.remaining_ms / 1e3
        try:
            check_token_ids("token_ids", message.token_ids, self._facts.vocab_size)
            token_ids = list(message.token_ids)
        except InvalidArgumentError:
            token_ids = []  # the digest will not fit either, so that the item is answered MISMATCH
        return ProposeItem(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            round_index=message.round_index,
            base_length=message.base_length,
            digest=message.digest,
            token_ids=token_ids,
            num_speculative_tokens=min(message.num_speculative_tokens, MAX_DRAFT_TOKENS),
            deadline_s=deadline_s,
            traceparent=message.traceparent,
        )

    async def GetDraftInfo(
        self,
        request: draft_pb2.GetDraftInfoRequest,
        context: grpc.aio.ServicerContext[
            draft_pb2.GetDraftInfoRequest, draft_pb2.GetDraftInfoResponse
        ],
    ) -> draft_pb2.GetDraftInfoResponse:
        """The drafters' facts and the present load."""
        del request, context
        self._check_serving()
        facts, engine = self._facts, self._engine
        return draft_pb2.GetDraftInfoResponse(
            drafters=facts.drafters,
            model=facts.model,
            token_table_digest=facts.token_table_digest,
            context_size=facts.context_size,
            num_sequences=engine.num_sequences,
            num_blocks=facts.pool.num_blocks if facts.pool else 0,
            num_free_blocks=facts.pool.num_free if facts.pool else 0,
            num_sessions=engine.num_sessions,
            num_steps=engine.num_steps,
        )


def _chunk(chunk: Chunk) -> draft_pb2.DraftChunk:
    item = chunk.item
    return draft_pb2.DraftChunk(
        sequence_id=item.sequence_id,
        epoch=item.epoch,
        round_index=item.round_index,
        base_length=item.base_length,
        start_index=chunk.start_index,
        token_ids=chunk.token_ids,
        distributions=map(distribution_to_proto, chunk.draft_probs),
        final=chunk.is_final,
        status=_STATUSES[chunk.status],
        detail=chunk.detail,
    )
