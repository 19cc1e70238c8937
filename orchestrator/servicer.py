"""The public RPCs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import structlog
from prometheus_client.metrics_core import Metric

from orchestrator.choices import run_choices
from orchestrator.decode_loop import DecodeLoop
from orchestrator.draft_pool import DraftPool
from orchestrator.generation import (
    Choice,
    Clock,
    encode_input,
    make_sequences,
    to_response,
    trace_end,
    trace_request,
    usage_of,
)
from orchestrator.metrics import RequestMetrics
from orchestrator.pool import Pool
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
from specdec.telemetry.metrics import gauge, labelled_counter
from specdec.telemetry.tracing import trace_id_of
from specdec.types import Acceptance
from specdec.v1 import orchestrator_pb2, orchestrator_pb2_grpc, target_pb2
from specdec.wire import ACCEPTANCES_TO_PROTO, SUPPORTED_SAMPLING_PARAMS

_log = structlog.get_logger(__name__)

_MAX_REQUEST_ID_LENGTH = 256
_RETRY_AFTER_MS = 1_000
# Longer inputs are tokenised on a thread, so that streams in progress are not held up.
_INLINE_INPUT_BYTES = 16 * 1024
_USAGE = "specdec-usage-bin"

GenerateContext = grpc.aio.ServicerContext[
    orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse
]


@dataclass(slots=True, kw_only=True)
class Backend:
    """What requests are served with, once the services are paired."""

    settings: OrchestratorSettings
    tokenization: Tokenization
    target_info: target_pb2.GetTargetInfoResponse
    """What the first target said of itself; all of the pool are alike but for their load."""
    targets: Pool[TargetClient]
    drafts: DraftPool | None
    loop: DecodeLoop
    active_rpcs: ActiveRpcInterceptor
    metrics: RequestMetrics

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters, the default first."""
        return self.drafts.drafters if self.drafts is not None else []


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves Generate and GetModelInfo."""

    _backend: Backend

    def __init__(self) -> None:
        """Refuses every call until `serve`."""
        self._live_request_ids: set[str] = set()
        self._num_streaming = 0
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
            # Each call runs in a context of its own, so that this ends with it.
            structlog.contextvars.bind_contextvars(
                request_id=request.request_id, trace_id=trace_id_of(span)
            )
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else clock.arrival_s + remaining_s
            sequences = await self._begin(request, deadline_s)
            drafter = self._drafter_for(sequences[0])
            choices = [
                Choice(index, sequence, Clock(clock.arrival_s))
                for index, sequence in enumerate(sequences)
            ]
            is_streaming = False
            try:
                running = run_choices(self._backend.loop, choices, drafter)
                async with contextlib.aclosing(running) as rounds:
                    async for choice, result, tokens in rounds:
                        self._num_streaming += not is_streaming
                        is_streaming = True
                        choice.clock.tick(result.queue_ms)
                        yield to_response(request.request_id, choice, tokens, drafter)
            except ServiceError:
                usage = usage_of(*sequences).SerializeToString()
                context.set_trailing_metadata(((_USAGE, usage),))
                raise
            finally:
                self._num_streaming -= is_streaming
                trace_end(span, sequences, drafter)
                for choice in choices:
                    self._end(choice)

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
    ) -> list[Sequence]:
        """Validates a request and makes the sequences of its choices."""
        backend, target = self._backend, self._backend.target_info
        trace_request(current_span(), request, target.model)
        arguments = (request, backend.tokenization, target.vocab_size)
        if request.ByteSize() > _INLINE_INPUT_BYTES:
            token_ids = await asyncio.to_thread(encode_input, *arguments)
        else:
            token_ids = encode_input(*arguments)
        return make_sequences(
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
        offered = self._backend.drafters
        if asked and self._backend.drafts is None:
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

    def _end(self, choice: Choice) -> None:
        """Lets both services free a choice's sequence, and counts it, whatever ended it."""
        sequence = choice.sequence
        self._backend.metrics.count_end(sequence, choice.clock)
        _log.info(
            "request ended",
            choice=choice.index,
            reason="aborted" if sequence.finish is None else sequence.finish.reason.value,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_completion_tokens=sequence.num_completion_tokens,
            num_rounds=sequence.stats.num_rounds,
        )
        reason = (
            target_pb2.RELEASE_REASON_CANCELLED
            if sequence.finish is None
            else target_pb2.RELEASE_REASON_FINISHED
        )
        self._backend.loop.verifier.release(sequence, reason)
        if self._backend.drafts is not None:
            self._backend.drafts.release(sequence)

    def collect_metrics(self) -> Iterator[Metric]:
        """Reads the gauges of what is in progress, and the pools'."""
        if self._refusal is not None:
            return
        backend = self._backend
        num_live = len(self._live_request_ids)
        num_running = backend.loop.num_running
        yield gauge("num_requests_running", "Generations in progress.", num_running)
        num_waiting = num_live - self._num_streaming
        yield gauge("num_requests_waiting", "Before their first token.", num_waiting)
        yield gauge("num_requests", "Requests with an open call.", num_live)
        yield gauge("num_targets", "Targets that can be given work.", len(backend.targets.usable()))
        if backend.drafts is not None:
            num_drafts = len(backend.drafts.usable())
            yield gauge("num_drafts", "Draft services that can be given work.", num_drafts)
            yield labelled_counter(
                "draft_fallbacks",
                "Rounds that ran plain although drafts were wanted.",
                "reason",
                dict(backend.drafts.fallbacks),
            )

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
        backend, target = self._backend, self._backend.target_info
        drafters = backend.drafters
        return orchestrator_pb2.GetModelInfoResponse(
            target_model=target.model,
            vocab_size=target.vocab_size,
            context_size=target.context_size,
            drafters=[self._drafter_info(name) for name in drafters],
            default_drafter=drafters[0] if drafters else "",
            num_speculative_tokens=backend.settings.num_speculative_tokens,
            supported_sampling_params=SUPPORTED_SAMPLING_PARAMS,
            load=await self._load(),
            dtype=target.dtype,
            eos_token_ids=target.eos_token_ids,
        )

    def _drafter_info(self, name: str) -> orchestrator_pb2.DrafterInfo:
        drafts = self._backend.drafts
        assert drafts is not None
        clients = [client for client in drafts.clients if client.offers(name)]
        models = [client.info.model for client in clients if client.info is not None]
        return orchestrator_pb2.DrafterInfo(
            name=name,
            model=models[0] if models and name == "model" else "",
            available=any(client.is_usable for client in clients),
            acceptances=[ACCEPTANCES_TO_PROTO[acceptance] for acceptance in Acceptance],
        )

    async def _load(self) -> orchestrator_pb2.Load:
        """Asks all targets and drafters for their gauges; what does not answer counts as 0."""
        backend = self._backend
        # Together: a pod that does not answer costs its whole timeout.
        targets, *others = await asyncio.gather(
            *(pool.ask_infos() for pool in (backend.targets, backend.drafts) if pool is not None)
        )
        drafts = [info for infos in others for info in infos]
        return orchestrator_pb2.Load(
            num_requests_running=backend.loop.num_running,
            # This call has an open handler too; what is asked for is the others.
            num_active_rpcs=max(0, backend.active_rpcs.num_active - 1),
            num_free_blocks=sum(info.num_free_blocks for info in targets),
            num_blocks=sum(info.num_blocks for info in targets),
            num_target_sequences=sum(info.num_sequences for info in targets),
            num_draft_sequences=sum(info.num_sequences for info in drafts),
            num_free_draft_blocks=sum(info.num_free_blocks for info in drafts),
            num_steps=sum(info.num_steps for info in targets),
            num_redraw_mismatches=sum(info.num_redraw_mismatches for info in targets),
            num_draft_fallbacks=backend.drafts.fallbacks.total() if backend.drafts else 0,
            num_targets=len(backend.targets.usable()),
            num_drafts=len(backend.drafts.usable()) if backend.drafts else 0,
        )
