"""The public RPCs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc

from orchestrator.decode_loop import DecodeLoop
from orchestrator.draft_client import DraftClient
from orchestrator.generation import (
    Clock,
    encode_input,
    make_sequence,
    to_response,
    trace_end,
    trace_request,
    usage_of,
)
from orchestrator.sequence import Sequence
from orchestrator.settings import OrchestratorSettings
from orchestrator.target_client import TargetClient
from orchestrator.tokenization import Tokenization
from specdec.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from specdec.rpc.interceptors import ActiveRpcInterceptor, current_span
from specdec.telemetry import names
from specdec.telemetry.tracing import trace_id_of
from specdec.types import Acceptance
from specdec.v1 import draft_pb2, orchestrator_pb2, orchestrator_pb2_grpc, target_pb2
from specdec.wire import ACCEPTANCES_TO_PROTO, SUPPORTED_SAMPLING_PARAMS

_MAX_REQUEST_ID_LENGTH = 256
_RETRY_AFTER_MS = 1_000
# Longer inputs are tokenised on a thread, so that streams in progress are not held up.
_INLINE_INPUT_BYTES = 16 * 1024
_NO_INFO = draft_pb2.GetDraftInfoResponse()
_USAGE = "specdec-usage-bin"

GenerateContext = grpc.aio.ServicerContext[
    orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse
]


@dataclass(slots=True, kw_only=True)
class Backend:
    """What requests are served with, once the services are paired."""

    settings: OrchestratorSettings
    tokenization: Tokenization
    target: TargetClient
    draft: DraftClient | None
    loop: DecodeLoop
    active_rpcs: ActiveRpcInterceptor

    @property
    def target_info(self) -> target_pb2.GetTargetInfoResponse:
        """What the target said when it was paired with."""
        if self.target.info is None:
            raise UnavailableError("no target has answered yet", reason="NO_TARGET")
        return self.target.info

    @property
    def draft_info(self) -> draft_pb2.GetDraftInfoResponse:
        """What the draft service said last; empty before it did."""
        if self.draft is None or self.draft.info is None:
            return _NO_INFO
        return self.draft.info


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves Generate and GetModelInfo."""

    _backend: Backend

    def __init__(self) -> None:
        """Refuses every call until `serve`."""
        self._live_request_ids: set[str] = set()
        self._refusal: UnavailableError | None = UnavailableError(
            "the service is starting", reason="STARTING"
        )

    def serve(self, backend: Backend) -> None:
        """Begins to serve."""
        self._backend, self._refusal = backend, None

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._refusal = UnavailableError("the service is shutting down", reason="DRAINING")

    async def Generate(
        self, request: orchestrator_pb2.GenerateRequest, context: GenerateContext
    ) -> AsyncIterator[orchestrator_pb2.GenerateResponse]:
        """Validates, then streams what each round delivers."""
        clock, span = Clock(), current_span()
        await context.send_initial_metadata(((names.TRACE_ID, trace_id_of(span)),))
        with self._admit(request):
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else clock.arrival_s + remaining_s
            sequence = await self._begin(request, deadline_s)
            drafter = self._drafter_for(sequence)
            try:
                async with contextlib.aclosing(self._backend.loop.run(sequence, drafter)) as rounds:
                    async for result, tokens in rounds:
                        clock.tick(result.queue_ms)
                        yield to_response(request.request_id, sequence, tokens, drafter, clock)
            except ServiceError:
                usage = usage_of(sequence).SerializeToString()
                context.set_trailing_metadata(((_USAGE, usage),))
                raise
            finally:
                self._release(sequence)
                trace_end(span, sequence, drafter)

    @contextlib.contextmanager
    def _admit(self, request: orchestrator_pb2.GenerateRequest) -> Iterator[None]:
        """Holds the request's id and its place while it lasts."""
        if self._refusal is not None:
            raise self._refusal
        if len(request.request_id) > _MAX_REQUEST_ID_LENGTH:
            detail = f"must be at most {_MAX_REQUEST_ID_LENGTH} characters"
            raise InvalidArgumentError("request_id", f"{detail} (got {len(request.request_id)})")
        request.request_id = request.request_id or uuid.uuid4().hex
        if request.request_id in self._live_request_ids:
            detail = f"request_id {request.request_id!r} is in progress"
            raise AlreadyExistsError(detail, reason="REQUEST_ID_IN_USE")
        limit = self._backend.settings.max_requests
        if len(self._live_request_ids) >= limit:
            raise ResourceExhaustedError(
                f"{limit} requests are in progress",
                reason="TOO_MANY_REQUESTS",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._live_request_ids.add(request.request_id)
        try:
            yield
        finally:
            self._live_request_ids.discard(request.request_id)

    async def _begin(
        self, request: orchestrator_pb2.GenerateRequest, deadline_s: float | None
    ) -> Sequence:
        """Validates a request and makes its sequence."""
        backend, target = self._backend, self._backend.target_info
        trace_request(current_span(), request, target.model)
        arguments = (request, backend.tokenization, target.vocab_size)
        if request.ByteSize() > _INLINE_INPUT_BYTES:
            token_ids = await asyncio.to_thread(encode_input, *arguments)
        else:
            token_ids = encode_input(*arguments)
        return make_sequence(
            request,
            token_ids,
            backend.tokenization,
            target,
            deadline_s=deadline_s,
            span=current_span(),
        )

    def _drafter_for(self, sequence: Sequence) -> str:
        """The drafter a sequence uses; "" when it decodes plainly."""
        asked = sequence.speculation.drafter
        offered = list(self._backend.draft_info.drafters)
        if asked and self._backend.draft is None:
            raise InvalidArgumentError(
                "speculation.drafter", f"no drafter is deployed (got {asked!r})"
            )
        # Before the draft service has answered once, its names are not known.
        if asked and offered and asked not in offered:
            detail = f"must be one of {', '.join(offered)} (got {asked!r})"
            raise InvalidArgumentError("speculation.drafter", detail)
        if not sequence.speculation.enabled or sequence.speculation.num_speculative_tokens == 0:
            return ""
        return asked or (offered[0] if offered else "")

    def _release(self, sequence: Sequence) -> None:
        """Lets both services free the sequence, whatever ended it."""
        reason = (
            target_pb2.RELEASE_REASON_CANCELLED
            if sequence.finish is None
            else target_pb2.RELEASE_REASON_FINISHED
        )
        self._backend.loop.verifier.release(sequence, reason)
        if self._backend.draft is not None:
            self._backend.draft.release(sequence)

    async def GetModelInfo(
        self,
        request: orchestrator_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            orchestrator_pb2.GetModelInfoRequest, orchestrator_pb2.GetModelInfoResponse
        ],
    ) -> orchestrator_pb2.GetModelInfoResponse:
        """What is served, and the load at this moment."""
        del request, context
        if self._refusal is not None:
            raise self._refusal
        backend, target, draft = (
            self._backend,
            self._backend.target_info,
            self._backend.draft_info,
        )
        return orchestrator_pb2.GetModelInfoResponse(
            target_model=target.model,
            vocab_size=target.vocab_size,
            context_size=target.context_size,
            drafters=[self._drafter_info(name, draft) for name in draft.drafters],
            default_drafter=draft.drafters[0] if draft.drafters else "",
            num_speculative_tokens=backend.settings.num_speculative_tokens,
            supported_sampling_params=SUPPORTED_SAMPLING_PARAMS,
            load=await self._load(),
            dtype=target.dtype,
            eos_token_ids=target.eos_token_ids,
        )

    def _drafter_info(
        self, name: str, info: draft_pb2.GetDraftInfoResponse
    ) -> orchestrator_pb2.DrafterInfo:
        draft = self._backend.draft
        return orchestrator_pb2.DrafterInfo(
            name=name,
            model=info.model if name == "model" else "",
            available=draft is not None and draft.is_connected,
            acceptances=[ACCEPTANCES_TO_PROTO[acceptance] for acceptance in Acceptance],
        )

    async def _load(self) -> orchestrator_pb2.Load:
        """Asks target and drafter for their gauges; what does not answer counts as 0."""
        backend = self._backend
        target, draft = target_pb2.GetTargetInfoResponse(), _NO_INFO
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            target = await asyncio.wait_for(backend.target.fetch_info(), timeout=2.0)
        if backend.draft is not None and backend.draft.is_connected:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                draft = await asyncio.wait_for(backend.draft.fetch_info(), timeout=2.0)
        return orchestrator_pb2.Load(
            num_requests_running=backend.loop.num_running,
            # This call has an open handler too; what is asked for is the others.
            num_active_rpcs=max(0, backend.active_rpcs.num_active - 1),
            num_free_blocks=target.num_free_blocks,
            num_blocks=target.num_blocks,
            num_target_sequences=target.num_sequences,
            num_draft_sequences=draft.num_sequences,
            num_free_draft_blocks=draft.num_free_blocks,
            num_steps=target.num_steps,
            num_redraw_mismatches=target.num_redraw_mismatches,
            num_draft_fallbacks=backend.draft.fallbacks.total() if backend.draft else 0,
        )
