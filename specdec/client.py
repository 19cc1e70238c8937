"""A client of the orchestrator, in a blocking and an asyncio form.

    with Client("127.0.0.1:50051") as client:
        stream = client.generate("Once upon a time", max_tokens=32, temperature=0)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(stream.result.speculation.acceptance_rate)

A keyword left out, or None, is not set on the wire: the service's default
holds. 0 is sent as 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status  # type: ignore[import-untyped]

from specdec.errors import FieldViolation
from specdec.rpc.channel import channel_options
from specdec.v1 import orchestrator_pb2 as pb
from specdec.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where `specdec up` serves."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest message sent or received: the services' own default."""

# gRPC reads ahead of a reader that pauses, by default megabytes: tens of thousands of
# rounds, computed for nobody if it goes away. A round's message has some 100 bytes.
_READ_AHEAD = (("grpc.http2.lookahead_bytes", 16 * 1024), ("grpc.http2.bdp_probe", 0))

TokenSource = Literal["accepted", "recovered", "bonus", "target"]
"""Where a token came from: a draft, or the target in one of three ways."""

_DETAIL_KINDS: tuple[type[Message], ...] = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
"""Text, token ids, or chat messages (mappings have the keys role and content)."""


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`; orchestrator.proto gives each one's range and default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    n: int | None
    logprobs: int | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    speculation: bool | None
    """False decodes plainly with the target alone."""
    num_speculative_tokens: int | None
    acceptance: Literal["rejection", "coupled"] | None
    drafter: str | None
    request_id: str | None
    timeout_s: float | None
    """Deadline of the whole call, in seconds."""


@dataclass(frozen=True, slots=True)
class Token:
    """One delivered token, with the text it released."""

    id: int
    text: str
    source: TokenSource
    logprob: float | None = None
    """Under the target's raw logits; None unless `logprobs` was given."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens at its position, best first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message appends to the output."""

    text: str
    tokens: tuple[Token, ...]
    index: int = 0
    """Which of the request's choices."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a generation."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """How drafting went."""

    drafter: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: tuple[int, ...]
    acceptance_rate: float
    mean_acceptance_length: float


@dataclass(frozen=True, slots=True)
class Timing:
    """How long it took, in milliseconds."""

    queue_ms: float
    time_to_first_token_ms: float
    total_ms: float
    mean_inter_token_ms: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: Literal["stop", "length"]
    matched: str | int | None
    """The stop string or stop id that ended it; None at a length limit."""
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    trace_id: str
    request_id: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The delivered ids."""
        return tuple(token.id for token in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens over the whole time, prefill included; 0 without a time."""
        total_ms = self.timing.total_ms
        return 1000 * len(self.tokens) / total_ms if total_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One drafter a request may name."""

    name: str
    model: str
    available: bool
    acceptances: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """The deployment's load at one moment."""

    num_requests_running: int
    num_active_rpcs: int
    num_free_blocks: int
    num_blocks: int
    num_target_sequences: int
    num_draft_sequences: int
    num_free_draft_blocks: int
    num_steps: int
    num_redraw_mismatches: int
    num_draft_fallbacks: int
    num_targets: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served."""

    target_model: str
    dtype: str
    vocab_size: int
    context_size: int
    eos_token_ids: tuple[int, ...]
    drafters: tuple[DrafterInfo, ...]
    default_drafter: str
    num_speculative_tokens: int
    supported_sampling_params: tuple[str, ...]
    load: Load


class GenerationError(Exception):
    """A call that ended with an error status."""

    def __init__(
        self,
        code: str,
        reason: str,
        message: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_ms: int | None = None,
    ) -> None:
        """Makes the error.

        Args:
            code: Name of the gRPC status, such as INVALID_ARGUMENT.
            reason: What went wrong, for programs; empty when the service gave none.
            message: What went wrong, for people.
            violations: The fields to mend.
            retry_after_ms: When another try may succeed, in ms.
        """
        super().__init__(" ".join(filter(None, (code, reason))) + f": {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.violations = violations
        self.retry_after_ms = retry_after_ms

    @classmethod
    def from_rpc(cls, error: grpc.RpcError) -> GenerationError:
        """Reads a failed call's status and its google.rpc details."""
        call = cast(grpc.Call, error)  # what a client catches is always both
        reason, retry_after_ms = "", None
        violations: list[FieldViolation] = []
        for detail in _details(call):
            if isinstance(detail, error_details_pb2.ErrorInfo):
                reason = detail.reason
            elif isinstance(detail, error_details_pb2.RetryInfo):
                retry_after_ms = detail.retry_delay.ToMilliseconds()
            elif isinstance(detail, error_details_pb2.BadRequest):
                violations += [
                    FieldViolation(v.field, v.description) for v in detail.field_violations
                ]
        code, message = call.code().name, call.details() or ""
        return cls(code, reason, message, tuple(violations), retry_after_ms)


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Turns a prompt and keywords into the wire's request.

    A value the wire cannot carry, such as a negative max_tokens, is a
    GenerationError with INVALID_ARGUMENT, as if the service had refused it.

    Args:
        prompt: What to continue.
        options: The keywords; those left out or None stay unset.

    Returns:
        The request.

    Raises:
        TypeError: For an unknown keyword or a value of a wrong type.
    """
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unknown generate option: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest(request_id=options.get("request_id") or "")
    if isinstance(prompt, str):
        request.prompt = prompt
    elif all(isinstance(part, int) for part in prompt):
        _set(request.token_ids, "ids", prompt)
        request.token_ids.SetInParent()  # an empty list is still the chosen input
    else:
        for part in prompt:
            message = part if isinstance(part, Mapping) else _fields(part)
            request.conversation.messages.add(**message)
    for name, value in options.items():
        if value is None or name in ("request_id", "timeout_s"):
            continue
        if name in ("stop", "bad_words") and isinstance(value, str):
            value = [value]  # a string is a sequence too: of its characters
        if name in pb.SamplingParams.DESCRIPTOR.fields_by_name:
            _set(request.sampling, name, value)
        elif name == "speculation":
            _set(request.speculation, "enabled", value)
        elif name == "acceptance":
            _set(request.speculation, name, f"ACCEPTANCE_{value}".upper())
        else:
            _set(request.speculation, name, value)
    return request


def _token(message: pb.GeneratedToken) -> Token:
    return Token(
        message.id,
        message.text,
        _source(message.source),
        message.logprob if message.HasField("logprob") else None,
        tuple((top.id, top.logprob) for top in message.top_logprobs),
    )


class _Output:
    """Gathers a stream's messages into chunks and, in the end, the Generation."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[Chunk]] = {}
        self._results: dict[int, Generation] = {}

    def add(self, response: pb.GenerateResponse) -> Chunk:
        chunk = Chunk(response.text, tuple(map(_token, response.tokens)), response.index)
        self._chunks.setdefault(response.index, []).append(chunk)
        if response.HasField("finish"):
            self._results[response.index] = self._finish(response)
        return chunk

    @property
    def results(self) -> tuple[Generation, ...]:
        if not self._results or self._results.keys() != self._chunks.keys():
            raise RuntimeError("the generation has not ended: iterate to the end first")
        return tuple(self._results[index] for index in sorted(self._results))

    def _finish(self, last: pb.GenerateResponse) -> Generation:
        chunks = self._chunks[last.index]
        matched = last.finish.WhichOneof("matched")
        is_stop = last.finish.reason == pb.FINISH_REASON_STOP
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            tokens=tuple(token for chunk in chunks for token in chunk.tokens),
            finish_reason="stop" if is_stop else "length",
            matched=getattr(last.finish, matched) if matched else None,
            usage=_read(Usage, last.usage),
            speculation=_read(SpeculationStats, last.speculation),
            timing=_read(Timing, last.timing),
            trace_id=last.trace_id,
            request_id=last.request_id,
        )


class GenerationStream:
    """A running generation: iterate over its chunks, then read `result`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._output = _Output()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            raise GenerationError.from_rpc(error) from None
        return self._output.add(response)

    @property
    def result(self) -> Generation:
        """The whole generation, the first choice's; RuntimeError before the stream has ended."""
        return self._output.results[0]

    @property
    def results(self) -> tuple[Generation, ...]:
        """All choices, by index; RuntimeError before the stream has ended."""
        return self._output.results

    def collect(self) -> Generation:
        """Runs to the end and returns the whole generation."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """Ends the call; iterating then raises GenerationError with CANCELLED."""
        self._call.cancel()


class AsyncGenerationStream:
    """A running generation: `async for` over its chunks, then read `result`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._output = _Output()
        self._is_cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise GenerationError.from_rpc(error) from None
        except asyncio.CancelledError:
            # grpc.aio raises this for a cancelled call and for a cancelled task
            # alike; only the latter may look like one to the caller.
            if not self._is_cancelled:
                raise
            raise GenerationError("CANCELLED", "", "cancelled by the caller") from None
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._output.add(response)

    @property
    def result(self) -> Generation:
        """The whole generation, the first choice's; RuntimeError before the stream has ended."""
        return self._output.results[0]

    @property
    def results(self) -> tuple[Generation, ...]:
        """All choices, by index; RuntimeError before the stream has ended."""
        return self._output.results

    async def collect(self) -> Generation:
        """Runs to the end and returns the whole generation."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """Ends the call; iterating then raises GenerationError with CANCELLED."""
        self._is_cancelled = True
        self._call.cancel()


class Client:
    """A blocking client; safe to share between threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """Opens a channel; it connects at the first call.

        Args:
            address: The orchestrator, HOST:PORT.
        """
        options = (*channel_options(MAX_MESSAGE_BYTES), *_READ_AHEAD)
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = OrchestratorServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Starts a generation.

        Args:
            prompt: Text, token ids, or chat messages.
            **options: See GenerateOptions.

        Returns:
            The stream of its chunks; errors come out while iterating.
        """
        request = build_request(prompt, options)
        return GenerationStream(self._stub.Generate(request, timeout=options.get("timeout_s")))

    def model_info(self, timeout_s: float | None = None) -> ModelInfo:
        """Asks what is served, and for the present load."""
        try:
            response = self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise GenerationError.from_rpc(error) from None
        return _read(ModelInfo, response)

    def close(self) -> None:
        """Closes the channel; running calls end with CANCELLED."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The asyncio twin of Client; make it inside a running event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """Opens a channel; it connects at the first call.

        Args:
            address: The orchestrator, HOST:PORT.
        """
        options = (*channel_options(MAX_MESSAGE_BYTES), *_READ_AHEAD)
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = OrchestratorServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Starts a generation.

        Args:
            prompt: Text, token ids, or chat messages.
            **options: See GenerateOptions.

        Returns:
            The stream of its chunks; errors come out while iterating.
        """
        request = build_request(prompt, options)
        return AsyncGenerationStream(self._stub.Generate(request, timeout=options.get("timeout_s")))

    async def model_info(self, timeout_s: float | None = None) -> ModelInfo:
        """Asks what is served, and for the present load."""
        try:
            response = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise GenerationError.from_rpc(error) from None
        return _read(ModelInfo, response)

    async def close(self) -> None:
        """Closes the channel; running calls end with CANCELLED."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _set(message: Message, name: str, value: Any) -> None:
    """Sets one field, whether scalar, repeated or map; a value out of range names it."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except ValueError as error:
        description = f"{error} (got {value!r})"
        raise GenerationError(
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            f"{name}: {description}",
            (FieldViolation(name, description),),
        ) from None


def _read(kind: type[_T], message: Message) -> _T:
    """Makes a dataclass from the message with the same field names."""
    values = {f.name: getattr(message, f.name) for f in fields(cast(Any, kind))}
    return kind(**{name: _plain(name, value) for name, value in values.items()})


def _plain(name: str, value: Any) -> Any:
    if name == "load":
        return _read(Load, value)
    if name == "drafters":
        return tuple(_read(DrafterInfo, drafter) for drafter in value)
    if name == "acceptances":
        return tuple(pb.Acceptance.Name(a).removeprefix("ACCEPTANCE_").lower() for a in value)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _fields(message: Any) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _source(source: pb.TokenSource) -> TokenSource:
    return cast(TokenSource, pb.TokenSource.Name(source).removeprefix("TOKEN_SOURCE_").lower())


def _details(call: grpc.Call) -> list[Message]:
    """The google.rpc messages of a status that are known here."""
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the status: say what the status says
        return []
    details: list[Message] = []
    for packed in status.details if status else ():
        for kind in _DETAIL_KINDS:
            detail = kind()
            if packed.Unpack(detail):  # only when it is of this kind
                details.append(detail)
    return details
