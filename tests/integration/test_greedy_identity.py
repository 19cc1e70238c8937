"""At temperature 0 in float32, the ids are those of transformers' greedy search."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from specdec.client import Generation
from specdec.models.default_model import prepare_default_model
from tests.integration.checks import becomes_idle, generate, greedy_ids, reference_ids
from tests.services import running
from tests.toy_models import save_noisy_copy, save_random_llama, save_random_qwen2

NUM_TOKENS = 12
DRAFT_LENGTHS = range(1, 9)
PROMPTS = [[(7 * i + n) % 64 for i in range(n)] for n in (1, 3, 15, 16, 17, 33)]
SAVE: dict[str, Callable[..., Path]] = {"llama": save_random_llama, "qwen2": save_random_qwen2}


@dataclass(frozen=True)
class Toy:
    """A target, drafts for it, and what transformers makes of the prompts."""

    target: Path
    drafts: dict[str, Path]
    references: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp(request.param)
    # transformers reads any Qwen2 folder with a tokenizer class that adds an EOS, id 64.
    save = partial(SAVE[request.param], padded_vocab_size=65 if request.param == "qwen2" else 64)
    target = save(folder / "target")
    drafts = {
        "itself": target,
        "unrelated": save(folder / "unrelated", seed=99, num_layers=1),
        "noisy": save_noisy_copy(target, folder / "noisy", noise=0.03),
    }
    return Toy(target, drafts, reference_ids(target, PROMPTS, NUM_TOKENS))


def acceptance_rate(generations: list[Generation]) -> float:
    drafted = sum(result.speculation.num_draft_tokens for result in generations)
    assert drafted > 0
    return sum(result.speculation.num_accepted_tokens for result in generations) / drafted


@pytest.mark.parametrize(
    ("draft", "block_size"), [("itself", 4), ("unrelated", 16), ("noisy", 4), ("itself", 16)]
)
async def test_every_draft_length_and_drafter_gives_the_reference(
    toy: Toy, draft: str, block_size: int, tmp_path: Path
) -> None:
    settings = {"block_size": block_size, "max_prefill_tokens": 8, "num_threads": 1}
    drafters = ["model", "ngram"] if draft == "noisy" else ["model"]
    async with running(
        toy.target,
        tmp_path,
        draft_model=toy.drafts[draft],
        drafter="model",
        target=settings,
        # Proposals of full length, however little is accepted.
        draft=settings | {"ngram_min_acceptance": 0.0},
    ) as services:
        for drafter in drafters:
            cases = [(prompt, k) for prompt in range(len(PROMPTS)) for k in DRAFT_LENGTHS]
            results = await asyncio.gather(
                *[
                    generate(
                        services.client,
                        PROMPTS[prompt],
                        temperature=0.0,
                        max_tokens=NUM_TOKENS,
                        num_speculative_tokens=k,
                        drafter=drafter,
                    )
                    for prompt, k in cases
                ]
            )
            for (prompt, k), result in zip(cases, results, strict=True):
                assert result.token_ids == toy.references[prompt], (drafter, prompt, k)
                assert result.speculation.drafter == drafter
            rate = acceptance_rate(results)
            if drafter == "model":
                lowest, highest = {"itself": (1, 1), "unrelated": (0, 0.2), "noisy": (0.1, 0.99)}[
                    draft
                ]
                assert lowest <= rate <= highest
        assert services.target.engine.stats.max_batch_size > 1
        assert services.target.engine.num_preemptions == 0
        await becomes_idle(services)


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
async def test_a_tight_pool_preempts_and_changes_nothing(
    toy: Toy, drafter: str, tmp_path: Path
) -> None:
    # 20 blocks of 4 tokens; each of 8 requests comes to need 7 to 12 of them.
    settings = {"block_size": 4, "num_blocks": 20, "max_prefill_tokens": 8, "num_threads": 1}
    async with running(
        toy.target,
        tmp_path,
        draft_model=toy.drafts["noisy"] if drafter == "model" else None,
        drafter=drafter,
        target=settings,
        draft=settings,
    ) as services:
        chosen = [2, 3, 4, 5, 2, 3, 4, 5]
        results = await asyncio.gather(
            *[
                greedy_ids(
                    services.client,
                    PROMPTS[prompt],
                    max_tokens=NUM_TOKENS,
                    num_speculative_tokens=4,
                )
                for prompt in chosen
            ]
        )
        for prompt, ids in zip(chosen, results, strict=True):
            assert ids == toy.references[prompt]
        assert services.target.engine.num_preemptions > 0
        await becomes_idle(services)


@pytest.mark.parametrize("draft", ["itself", "unrelated", "noisy"])
async def test_draft_pool_too_small_costs_only_speed(toy: Toy, draft: str, tmp_path: Path) -> None:
    async with running(
        toy.target,
        tmp_path,
        draft_model=toy.drafts[draft],
        drafter="model",
        target={"num_threads": 1},
        draft={"block_size": 4, "num_blocks": 6, "num_threads": 1},
    ) as services:
        results = await asyncio.gather(
            *[greedy_ids(services.client, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
        )
        assert results == toy.references
        await becomes_idle(services)


# The default model.

MESSAGES = [
    "Write two sentences about how bread is baked.",
    "List the numbers from one to ten, and then list the numbers from one to ten again.",
    "def add(a, b):\n    return a + b\n\nRename the function above to plus.",
]


@dataclass(frozen=True)
class DefaultModel:
    """The default model and its greedy answers to MESSAGES."""

    folder: Path
    conversations: list[list[dict[str, str]]]
    references: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def default_model() -> DefaultModel:
    folder = prepare_default_model(lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversations = [[{"role": "user", "content": message}] for message in MESSAGES]
    prompts = [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for conversation in conversations
    ]
    return DefaultModel(folder, conversations, reference_ids(folder, prompts, 32))


def save_small_draft(target: Path, folder: Path) -> Path:
    """Saves a random model of two layers with the target's tokenizer."""
    config = AutoConfig.from_pretrained(target)
    small = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(small).save_pretrained(folder)
    for path in target.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("draft", ["itself", "unrelated"])
async def test_default_model_gives_the_reference(
    default_model: DefaultModel, draft: str, tmp_path: Path
) -> None:
    if draft == "itself":
        draft_model = default_model.folder
    else:
        draft_model = save_small_draft(default_model.folder, tmp_path / "draft")
    async with running(
        default_model.folder,
        tmp_path / "traces",
        draft_model=draft_model,
        drafter="model",
        target={"num_blocks": 256, "num_threads": 1},
        draft={"num_blocks": 256, "num_threads": 1},
    ) as services:
        drafters = ["model", "ngram"] if draft == "itself" else ["model"]
        # 18 requests at once with both drafters.
        cases = [(i, k, name) for i in range(len(MESSAGES)) for k in (1, 3, 8) for name in drafters]
        results = await asyncio.gather(
            *[
                generate(
                    services.client,
                    default_model.conversations[i],
                    temperature=0.0,
                    max_tokens=32,
                    num_speculative_tokens=k,
                    drafter=name,
                )
                for i, k, name in cases
            ]
        )
        for (i, k, name), result in zip(cases, results, strict=True):
            assert result.token_ids == default_model.references[i], (i, k, name)
        drafted = [
            result for (_, _, name), result in zip(cases, results, strict=True) if name == "model"
        ]
        if draft == "itself":
            assert acceptance_rate(drafted) == 1.0
        else:
            assert acceptance_rate(drafted) < 0.1
        assert services.target.engine.stats.max_batch_size > 1
        await becomes_idle(services)
