"""The client against a server that says what a test tells it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from specdec.client import (
    AsyncClient,
    ChatMessage,
    Chunk,
    Client,
    GenerationError,
    Token,
    build_request,
)
from specdec.errors import (
    FieldViolation,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
)
from specdec.rpc.errors import to_status
from specdec.v1 import orchestrator_pb2 as pb
from specdec.v1 import orchestrator_pb2_grpc

TRACE_ID = "0123456789abcdef" * 2


class FakeOrchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers "one two three!" in two messages, or with `error`, or without an end."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.error: ServiceError | None = None
        self.is_endless = False
        self.ended = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.ended.set)
        if self.error:
            context.abort_with_status(to_status(self.error))
        request_id = request.request_id or "made-here"
        tokens = [pb.GeneratedToken(id=1, text="one", source=pb.TOKEN_SOURCE_TARGET)]
        yield pb.GenerateResponse(request_id=request_id, text="one", tokens=tokens)
        if self.is_endless:
            self.ended.wait(30)
            return
        sources = [pb.TOKEN_SOURCE_ACCEPTED, pb.TOKEN_SOURCE_RECOVERED, pb.TOKEN_SOURCE_BONUS]
        texts = [" two", " three", "!"]
        yield pb.GenerateResponse(
            request_id=request_id,
            text="".join(texts),
            tokens=[
                pb.GeneratedToken(id=i, text=text, source=source)
                for i, (text, source) in enumerate(zip(texts, sources, strict=True), start=2)
            ],
            finish=pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=4),
            usage=pb.Usage(prompt_tokens=7, completion_tokens=4, accepted_draft_tokens=1),
            speculation=pb.SpeculationStats(
                drafter="ngram",
                num_rounds=3,
                num_draft_tokens=2,
                num_accepted_tokens=1,
                num_accepted_tokens_per_position=[1, 0],
                acceptance_rate=0.5,
                mean_acceptance_length=4 / 3,
            ),
            trace_id=TRACE_ID,
            timing=pb.Timing(total_ms=200, time_to_first_token_ms=50),
        )

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> Any:
        drafter = pb.DrafterInfo(
            name="ngram",
            available=True,
            acceptances=[pb.ACCEPTANCE_REJECTION, pb.ACCEPTANCE_COUPLED],
        )
        return pb.GetModelInfoResponse(
            target_model="toy",
            vocab_size=16,
            eos_token_ids=[4],
            drafters=[drafter],
            load=pb.Load(num_blocks=8),
        )


@contextmanager
def serving(fake: FakeOrchestrator) -> Iterator[str]:
    """Serves the fake; gives its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def fake() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
def address(fake: FakeOrchestrator) -> Iterator[str]:
    with serving(fake) as address:
        yield address


def test_what_is_not_given_is_not_on_the_wire() -> None:
    request = build_request("hi", {"temperature": None, "stop": None, "drafter": None})
    assert request == pb.GenerateRequest(prompt="hi")
    assert not request.HasField("sampling")
    assert not request.HasField("speculation")


def test_zero_and_false_are_on_the_wire() -> None:
    options = {"temperature": 0, "seed": 0, "ignore_eos": False, "num_speculative_tokens": 0}
    request = build_request("hi", options)  # type: ignore[arg-type]
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.sampling.HasField("ignore_eos")
    assert request.speculation.HasField("num_speculative_tokens")


def test_every_option_reaches_its_field() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 40,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {3: -1.5},
        "seed": 2**64 - 1,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "n": 2,
        "logprobs": 0,
        "allowed_token_ids": [1, 2],
        "bad_words": ["c"],
    }
    assert sampling.keys() == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    speculation = {"num_speculative_tokens": 3, "drafter": "ngram"}
    request = build_request(
        "hi",
        {  # type: ignore[arg-type]
            **sampling,
            **speculation,
            "speculation": False,
            "acceptance": "coupled",
            "request_id": "r1",
            "timeout_s": 3.0,
        },
    )
    assert request == pb.GenerateRequest(
        request_id="r1",
        prompt="hi",
        sampling=pb.SamplingParams(**sampling),
        speculation=pb.SpeculationParams(
            **speculation, enabled=False, acceptance=pb.ACCEPTANCE_COUPLED
        ),
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", {"prompt": ""}),
        ([3, 1], {"tokenIds": {"ids": [3, 1]}}),
        ([], {"tokenIds": {}}),
        (
            [{"role": "system", "content": "s"}, ChatMessage("user", "u")],
            {
                "conversation": {
                    "messages": [
                        {"role": "system", "content": "s"},
                        {"role": "user", "content": "u"},
                    ]
                }
            },
        ),
    ],
)
def test_prompts(prompt: Any, expected: dict[str, Any]) -> None:
    assert MessageToDict(build_request(prompt, {})) == expected


def test_one_stop_string_is_not_taken_apart() -> None:
    assert list(build_request("hi", {"stop": "end"}).sampling.stop) == ["end"]


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", -1), ("seed", 2**64), ("acceptance", "lossy")]
)
def test_a_value_the_wire_cannot_carry_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(GenerationError, match=name) as caught:
        build_request("hi", {name: value})  # type: ignore[misc]
    assert caught.value.code == "INVALID_ARGUMENT"
    assert [violation.field for violation in caught.value.violations] == [name]


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_request("hi", {"temprature": 1})  # type: ignore[typeddict-unknown-key]


def test_stream_gives_chunks_then_the_result(fake: FakeOrchestrator, address: str) -> None:
    with Client(address) as client:
        stream = client.generate("hi", max_tokens=8, timeout_s=10)
        first = next(stream)
        assert first == Chunk("one", (Token(1, "one", "target"),))
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.result
        rest = list(stream)
    assert [[token.source for token in chunk.tokens] for chunk in rest] == [
        ["accepted", "recovered", "bonus"]
    ]
    result = stream.result
    assert result.text == "one two three!"
    assert result.token_ids == (1, 2, 3, 4)
    assert (result.finish_reason, result.matched) == ("stop", 4)
    assert result.usage.prompt_tokens == 7
    assert result.speculation.num_accepted_tokens_per_position == (1, 0)
    assert result.trace_id == TRACE_ID
    assert result.request_id == "made-here"
    assert result.tokens_per_second == 20
    assert fake.requests == [build_request("hi", {"max_tokens": 8})]


async def test_async_gives_the_same(address: str) -> None:
    async with AsyncClient(address) as client:
        collected = await client.generate("hi").collect()
        chunks = [chunk async for chunk in client.generate("hi")]
        assert (await client.model_info()).target_model == "toy"
    with Client(address) as client:
        assert client.generate("hi").collect() == collected
        assert list(client.generate("hi")) == chunks


ERRORS = [
    (
        InvalidArgumentError("sampling.top_p", "must be in (0, 1] (got 2)"),
        "INVALID_ARGUMENT",
        (FieldViolation("sampling.top_p", "must be in (0, 1] (got 2)"),),
        None,
    ),
    (
        ResourceExhaustedError("no room", reason="QUEUE_FULL", retry_after_ms=250),
        "RESOURCE_EXHAUSTED",
        (),
        250,
    ),
]


@pytest.mark.parametrize(("error", "code", "violations", "retry_after_ms"), ERRORS)
async def test_errors_carry_their_details(
    fake: FakeOrchestrator,
    address: str,
    error: ServiceError,
    code: str,
    violations: tuple[FieldViolation, ...],
    retry_after_ms: int | None,
) -> None:
    fake.error = error
    with Client(address) as client, pytest.raises(GenerationError) as caught:
        client.generate("hi").collect()
    async with AsyncClient(address) as async_client:
        with pytest.raises(GenerationError) as caught_async:
            await async_client.generate("hi").collect()
    for raised in (caught.value, caught_async.value):
        assert (raised.code, raised.reason) == (code, error.reason)
        assert raised.message == error.message
        assert raised.violations == violations
        assert raised.retry_after_ms == retry_after_ms


def test_nobody_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(GenerationError) as caught:
        client.generate("hi").collect()
    assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "")


def test_cancel_reaches_the_service(fake: FakeOrchestrator, address: str) -> None:
    fake.is_endless = True
    with Client(address) as client:
        stream = client.generate("hi")
        next(stream)
        stream.cancel()
        with pytest.raises(GenerationError) as caught:
            next(stream)
        assert caught.value.code == "CANCELLED"
        assert fake.ended.wait(5)


async def test_async_cancel_is_an_error_of_the_call(fake: FakeOrchestrator, address: str) -> None:
    fake.is_endless = True
    async with AsyncClient(address) as client:
        stream = client.generate("hi")
        await anext(stream)
        stream.cancel()
        with pytest.raises(GenerationError) as caught:
            await anext(stream)
        assert caught.value.code == "CANCELLED"
        assert await asyncio.to_thread(fake.ended.wait, 5)


async def test_cancelling_the_task_cancels_the_call(fake: FakeOrchestrator, address: str) -> None:
    fake.is_endless = True
    async with AsyncClient(address) as client:
        stream = client.generate("hi")
        await anext(stream)
        task = asyncio.create_task(stream.collect())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.ended.wait, 5)


def test_timeout_is_deadline_exceeded(fake: FakeOrchestrator, address: str) -> None:
    fake.is_endless = True
    with Client(address) as client, pytest.raises(GenerationError) as caught:
        client.generate("hi", timeout_s=0.2).collect()
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_model_info(address: str) -> None:
    with Client(address) as client:
        info = client.model_info()
    assert (info.target_model, info.vocab_size, info.eos_token_ids) == ("toy", 16, (4,))
    assert info.drafters[0].acceptances == ("rejection", "coupled")
    assert info.load.num_blocks == 8
