"""What cannot be honoured is refused by name; whoever else is served notices nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from orchestrator.service import OrchestratorService
from orchestrator.settings import OrchestratorSettings
from specdec.client import GenerationError, Prompt
from specdec.rpc.channel import open_channel
from specdec.rpc.server import PortInUseError
from specdec.rpc.service import StartError
from specdec.v1 import orchestrator_pb2 as pb
from specdec.v1 import orchestrator_pb2_grpc
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.integration.checks import (
    becomes_idle,
    error_of,
    generate,
    greedy_ids,
)
from tests.services import Services, running
from tests.toy_models import save_random_llama, toy_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 50
PADDED_VOCAB_SIZE = 64
CONTEXT_SIZE = 96
CANARY = [5, 6, 7, 5, 6]


@dataclass
class Deployment:
    """A deployment and what its canary requests give."""

    services: Services
    canary_ids: tuple[int, ...]

    async def check_canaries(self, num_canaries: int = 2) -> None:
        ids = await asyncio.gather(
            *[greedy_ids(self.services.client, CANARY, max_tokens=12) for _ in range(num_canaries)]
        )
        assert set(ids) == {self.canary_ids}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy whose embeddings are wider than its tokenizer."""
    return save_random_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=PADDED_VOCAB_SIZE,
        max_position_embeddings=CONTEXT_SIZE,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    settings = {"num_threads": 1}
    async with running(
        model,
        tmp_path_factory.mktemp("traces"),
        draft_model=model,
        drafter="model",
        target=settings,
        draft=settings,
    ) as services:
        canary_ids = await greedy_ids(services.client, CANARY, max_tokens=12)
        yield Deployment(services, canary_ids)
        await becomes_idle(services)


async def check_refused(
    deployment: Deployment,
    prompt: Prompt,
    field: str,
    reason: str = "INVALID_VALUE",
    **options: Any,
) -> GenerationError:
    """The request is refused by that field, between and beside unchanged canaries."""
    error, _ = await asyncio.gather(
        error_of(deployment.services.client, prompt, **options), deployment.check_canaries()
    )
    assert error.code == "INVALID_ARGUMENT", error
    assert error.reason == reason
    assert [violation.field for violation in error.violations] == [field]
    assert field in error.message
    await deployment.check_canaries(1)
    return error


# Prompts.


@pytest.mark.parametrize(
    ("prompt", "field"), [("", "prompt"), ("   ", "prompt"), ([], "token_ids.ids")]
)
async def test_empty_prompts_are_refused(
    deployment: Deployment, prompt: Prompt, field: str
) -> None:
    await check_refused(deployment, prompt, field)


async def test_an_unset_input_is_refused(deployment: Deployment) -> None:
    async with open_channel(deployment.services.orchestrator.address, 2**20) as channel:
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(pb.GenerateRequest())
        assert (await call.code()).name == "INVALID_ARGUMENT"
        assert "input" in await call.details()


async def test_a_conversation_without_template_is_refused(deployment: Deployment) -> None:
    await check_refused(deployment, [{"role": "user", "content": "t1"}], "conversation")


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("size", [CONTEXT_SIZE, CONTEXT_SIZE + 1, 10 * CONTEXT_SIZE])
async def test_a_prompt_without_room_for_a_token_is_refused_with_both_sizes(
    deployment: Deployment, size: int, is_text: bool
) -> None:
    prompt: Prompt = " ".join(["t3"] * size) if is_text else [3] * size
    field = "prompt" if is_text else "token_ids"
    error = await check_refused(deployment, prompt, field, "PROMPT_TOO_LONG")
    assert str(size) in error.message
    assert str(CONTEXT_SIZE) in error.message


async def test_the_longest_prompt_leaves_room_for_one_token(deployment: Deployment) -> None:
    client = deployment.services.client
    for options in ({}, {"max_tokens": 1000}, {"max_tokens": 1}):
        result = await generate(client, [3] * (CONTEXT_SIZE - 1), temperature=0.0, **options)
        assert len(result.token_ids) == 1
        assert result.finish_reason == "length"
    # Without max_tokens, and with any, the context is the end.
    whole = await generate(client, [3], temperature=0.0)
    assert len(whole.token_ids) == CONTEXT_SIZE - 1
    assert whole.token_ids[: CONTEXT_SIZE - 11] == (
        await greedy_ids(client, [3], max_tokens=CONTEXT_SIZE - 11)
    )


@pytest.mark.parametrize(
    "token_id", [VOCAB_SIZE, VOCAB_SIZE + 1, PADDED_VOCAB_SIZE, 2**31, 2**32 - 1]
)
async def test_ids_out_of_range_are_refused(deployment: Deployment, token_id: int) -> None:
    error = await check_refused(deployment, [1, token_id, 2], "token_ids.ids[1]")
    assert str(token_id) in error.message
    assert str(VOCAB_SIZE) in error.message
    await check_refused(deployment, [1], "sampling.stop_token_ids[0]", stop_token_ids=[token_id, 1])


# Settings.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["temperature"], [-1.0, -1e-30, math.nan, math.inf, -math.inf]),
        *itertools.product(["top_p"], [-1.0, 0.0, 1.5, math.nan, math.inf]),
        *itertools.product(["top_k"], [-2, -(2**31)]),
        ("max_tokens", 0),
        *itertools.product(["min_p"], [-1.0, -1e-9, 1.5, math.nan, math.inf]),
        *itertools.product(["repetition_penalty"], [0.0, -1.0, math.nan, math.inf]),
        *itertools.product(
            ["presence_penalty", "frequency_penalty"], [2.1, -3.0, math.nan, -math.inf]
        ),
        ("stop", ["x"] * 17),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("logit_bias", {i: 0.5 for i in range(1025)}),
        ("bad_words", ["t1"] * 257),
        *itertools.product(["logprobs"], [21, 2**31]),
        *itertools.product(["n"], [0, 65, 2**32 - 1]),
    ],
)
async def test_settings_out_of_range_are_refused(
    deployment: Deployment, name: str, value: Any
) -> None:
    await check_refused(deployment, [1], f"sampling.{name}", **{name: value})


@pytest.mark.parametrize("bias", [100.5, -101.0, math.nan, math.inf])
async def test_biases_out_of_range_are_refused(deployment: Deployment, bias: float) -> None:
    await check_refused(deployment, [1], "sampling.logit_bias[3]", logit_bias={3: bias})


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31, 2**32 - 1])
async def test_ids_beyond_the_vocabulary_are_refused(deployment: Deployment, token_id: int) -> None:
    await check_refused(
        deployment, [1], f"sampling.logit_bias[{token_id}]", logit_bias={token_id: 1.0}
    )
    await check_refused(
        deployment, [1], "sampling.allowed_token_ids[1]", allowed_token_ids=[1, token_id]
    )


@pytest.mark.parametrize("word", ["", " ", "\n"])
async def test_empty_bad_words_are_refused(deployment: Deployment, word: str) -> None:
    await check_refused(deployment, [1], "sampling.bad_words[1]", bad_words=["t1", word])


async def test_what_contradicts_itself_is_refused(deployment: Deployment) -> None:
    await check_refused(deployment, [1], "sampling.min_tokens", min_tokens=5, max_tokens=4)
    nothing = {"allowed_token_ids": [3, 4], "stop_token_ids": [3, 4]}
    await check_refused(deployment, [1], "sampling.allowed_token_ids", min_tokens=1, **nothing)
    await check_refused(
        deployment,
        [1],
        "sampling.allowed_token_ids",
        allowed_token_ids=[3],
        bad_words=["t3"],
    )


async def test_supported_parameters_are_those_not_refused(deployment: Deployment) -> None:
    info = await deployment.services.client.model_info()
    assert set(info.supported_sampling_params) == {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "logprobs",
        "n",
        "allowed_token_ids",
        "bad_words",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("min_tokens", 0),
        ("include_stop_str_in_output", False),
        ("n", 1),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 1.0),
        ("ignore_eos", False),
        ("seed", 0),
    ],
)
async def test_a_neutral_value_equals_unset(deployment: Deployment, name: str, value: Any) -> None:
    client = deployment.services.client
    ids = await greedy_ids(client, CANARY, max_tokens=12, **{name: value})
    assert ids == deployment.canary_ids


async def test_an_explicit_zero_is_not_unset(deployment: Deployment) -> None:
    client = deployment.services.client
    # Unset: temperature 1, and every run another seed.
    unset = [(await generate(client, CANARY, max_tokens=12)).token_ids for _ in range(4)]
    assert len(set(unset)) == 4
    assert await greedy_ids(client, CANARY, max_tokens=12) == deployment.canary_ids
    # Seed 0 is a seed.
    zero = [(await generate(client, CANARY, max_tokens=12, seed=0)).token_ids for _ in range(2)]
    assert zero[0] == zero[1]
    assert zero[0] not in unset
    # No drafting at all.
    result = await generate(client, CANARY, num_speculative_tokens=0, temperature=0.0, max_tokens=9)
    assert result.speculation.num_draft_tokens == 0
    assert result.token_ids == deployment.canary_ids[:9]
    # Nothing is 0 but would be taken for the default.
    await check_refused(deployment, [1], "sampling.top_p", top_p=0.0)
    await check_refused(deployment, [1], "sampling.max_tokens", max_tokens=0)


async def test_every_combination_of_sampling_settings_is_served_or_refused(
    deployment: Deployment,
) -> None:
    """A55: T, top-p and top-k together; never INTERNAL, never another's harm."""
    temperatures = [-1.0, math.nan, math.inf, 0.0, 1e-45, 1e-8, 1e-4, 100.0, 1e6, 3e38]
    top_ps = [-1.0, 0.0, 1e-45, 1e-9, 1.0, 1.5]
    top_ks = [-2, -1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1]
    client = deployment.services.client

    async def run(temperature: float, top_p: float, top_k: int) -> None:
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        is_valid = 0 <= temperature < math.inf and 0 < top_p <= 1 and top_k >= -1
        if not is_valid:
            error = await error_of(client, CANARY, max_tokens=4, **options)
            assert error.code == "INVALID_ARGUMENT", options
            return
        result = await generate(client, CANARY, max_tokens=4, num_speculative_tokens=2, **options)
        assert len(result.token_ids) == 4
        assert max(result.token_ids) < VOCAB_SIZE
        # Hotter than a million, all logits are equal in float32.
        is_sharp = temperature <= 1e6 and (top_p <= 1e-9 or top_k == 1)
        if temperature <= 1e-8 or is_sharp:
            assert result.token_ids == deployment.canary_ids[:4], options

    # Refusals cost nothing; of the rest all are served at once, canaries among them.
    grid = list(itertools.product(temperatures, top_ps, top_ks))
    for first in range(0, len(grid), 140):
        await asyncio.gather(
            deployment.check_canaries(4),
            *[run(*combination) for combination in grid[first : first + 140]],
        )
    await deployment.check_canaries()


async def test_speculation_settings_are_checked(deployment: Deployment) -> None:
    await check_refused(
        deployment, [1], "speculation.num_speculative_tokens", num_speculative_tokens=65
    )
    error = await check_refused(deployment, [1], "speculation.drafter", drafter="medusa")
    assert "model" in error.message
    assert "ngram" in error.message
    assert "medusa" in error.message
    async with open_channel(deployment.services.orchestrator.address, 2**20) as channel:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1]), speculation=pb.SpeculationParams(acceptance=7)
        )
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(request)
        assert (await call.code()).name == "INVALID_ARGUMENT"
        assert "speculation.acceptance" in await call.details()
    # 64 is within range, and longer than what is left.
    ids = await greedy_ids(
        deployment.services.client, CANARY, max_tokens=12, num_speculative_tokens=64
    )
    assert ids == deployment.canary_ids


# Request ids.


async def test_a_live_request_id_is_refused_and_free_again_afterwards(
    deployment: Deployment,
) -> None:
    client = deployment.services.client
    stream = client.generate([1], request_id="twin", temperature=0.0, num_speculative_tokens=0)
    await anext(aiter(stream))
    error = await error_of(client, [2], request_id="twin", max_tokens=3)
    assert (error.code, error.reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    assert "twin" in error.message
    # The refusal ended neither the first nor its claim on the id.
    again = await error_of(client, [2], request_id="twin", max_tokens=3)
    assert again.code == "ALREADY_EXISTS"
    result = await stream.collect()
    assert result.request_id == "twin"
    assert len(result.token_ids) == CONTEXT_SIZE - 1
    later = await generate(client, [2], request_id="twin", max_tokens=3)
    assert later.request_id == "twin"
    await becomes_idle(deployment.services)
    await check_refused(deployment, [1], "request_id", request_id="x" * 257)


async def test_request_ids_are_made_when_none_is_given(deployment: Deployment) -> None:
    client = deployment.services.client
    results = await asyncio.gather(*[generate(client, [1], max_tokens=2) for _ in range(3)])
    assert len({result.request_id for result in results} - {""}) == 3


# Padded vocabulary.


async def test_padded_ids_are_never_emitted(deployment: Deployment, model: Path) -> None:
    client = deployment.services.client
    info = await client.model_info()
    assert info.vocab_size == VOCAB_SIZE
    # At T = 100 all ids are about equally likely: 14 of 64 would be padding.
    results = await asyncio.gather(
        *[
            generate(client, [1], temperature=100.0, max_tokens=40, acceptance=acceptance)
            for acceptance in ("rejection", "coupled")
            for _ in range(6)
        ]
    )
    emitted = [token_id for result in results for token_id in result.token_ids]
    assert max(emitted) < VOCAB_SIZE
    assert len(set(emitted)) > 0.9 * VOCAB_SIZE


# Starting.


def orchestrator_settings(model: Path, target: str, **options: Any) -> OrchestratorSettings:
    return OrchestratorSettings(
        **(
            {"model": str(model), "target": target, "port": 0, "drain_grace_ms": 0}
            | {"startup_timeout_ms": 10_000}
            | options
        )
    )


async def start_error(service: Any) -> str:
    """Why a service does not start; it is closed again."""
    with pytest.raises(StartError) as raised:
        await service.start()
    await service._server.stop(0)
    if isinstance(service, OrchestratorService):
        await service.close()
    return str(raised.value)


def with_swapped_tokens(model: Path, folder: Path) -> Path:
    """The same weights under a tokenizer in which two tokens are swapped."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    table = content["model"]["vocab"]
    table["t1"], table["t2"] = table["t2"], table["t1"]
    path.write_text(json.dumps(content))
    return folder


async def test_a_draft_model_with_another_token_table_is_refused(
    deployment: Deployment, model: Path, tmp_path: Path
) -> None:
    draft_model = with_swapped_tokens(model, tmp_path / "swapped")
    settings = DraftSettings(
        drafter="model", model=str(draft_model), port=0, dtype="float32", num_blocks=8,
        trace_dir=tmp_path, drain_grace_ms=0, num_threads=1,
    )  # fmt: skip
    async with DraftService(settings) as draft:
        reason = await start_error(
            OrchestratorService(
                orchestrator_settings(
                    model,
                    deployment.services.target.address,
                    draft=draft.address,
                    trace_dir=tmp_path,
                )
            )
        )
        assert "token table" in reason
        assert draft.address in reason
    await deployment.check_canaries()


async def test_an_orchestrator_with_another_tokenizer_is_refused(
    deployment: Deployment, model: Path, tmp_path: Path
) -> None:
    other = with_swapped_tokens(model, tmp_path / "swapped")
    target = deployment.services.target.address
    reason = await start_error(
        OrchestratorService(orchestrator_settings(other, target, trace_dir=tmp_path))
    )
    assert "token table" in reason
    assert target in reason


async def test_an_absent_target_is_named(model: Path, tmp_path: Path) -> None:
    settings = orchestrator_settings(
        model, "127.0.0.1:1", startup_timeout_ms=300, trace_dir=tmp_path
    )
    assert "127.0.0.1:1" in await start_error(OrchestratorService(settings))


async def test_a_checkpoint_without_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    common = {"model": str(bare), "port": 0, "num_blocks": 8, "trace_dir": tmp_path}
    for service in (
        TargetService(TargetSettings(**common)),
        DraftService(DraftSettings(drafter="model", **common)),
        OrchestratorService(orchestrator_settings(bare, "127.0.0.1:1", trace_dir=tmp_path)),
    ):
        reason = await start_error(service)
        assert "tokenizer" in reason
        assert str(bare) in reason


async def test_a_service_that_could_not_start_can_be_stopped(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path / "absent"), "port": 0, "trace_dir": tmp_path}
    for service in (
        TargetService(TargetSettings(**settings)),
        DraftService(DraftSettings(drafter="model", **settings)),
        OrchestratorService(orchestrator_settings(tmp_path / "absent", "127.0.0.1:1")),
    ):
        with pytest.raises(StartError, match="absent"):
            await service.start()
        await service.stop()


async def test_a_tokenizer_larger_than_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(model, folder)
    toy_tokenizer(PADDED_VOCAB_SIZE + 1).save_pretrained(folder)
    common = {"model": str(folder), "port": 0, "num_blocks": 8, "trace_dir": tmp_path}
    reason = await start_error(TargetService(TargetSettings(**common)))
    assert str(PADDED_VOCAB_SIZE) in reason
    assert str(PADDED_VOCAB_SIZE + 1) in reason


async def test_a_taken_port_is_named(deployment: Deployment, model: Path, tmp_path: Path) -> None:
    for taken in (deployment.services.target.address, deployment.services.orchestrator.address):
        port = int(taken.rpartition(":")[2])
        settings = TargetSettings(model=str(model), port=port, trace_dir=tmp_path, num_blocks=8)
        with pytest.raises(PortInUseError, match=taken):
            await TargetService(settings).start()
    await deployment.check_canaries()
