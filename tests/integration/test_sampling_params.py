"""Every sampling parameter gives the same output in every mode, and transformers' at T = 0."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.client import Generation
from tests.integration.checks import generate
from tests.services import Services, running
from tests.toy_models import save_noisy_copy, save_random_llama

VOCAB_SIZE = 64
NUM_TOKENS = 40
PROMPTS = [[random.Random(seed).randrange(VOCAB_SIZE) for _ in range(9)] for seed in range(4)]
PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "hot": {"temperature": 50.0},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.8},
    "logit_bias": {"logit_bias": {3: 2.0, 9: -5.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, 5, 8, 13, 21, 34]},
    "bad_words": {"bad_words": ["t7", "t11 t3", "t5 t5"]},
    "min_tokens": {"min_tokens": 25, "stop_token_ids": list(range(0, 64, 3))},
    "stop": {"stop": ["t3 t", "t50"], "min_tokens": 5},
    "together": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 1.5},
        "bad_words": ["t9"],
        "min_tokens": 10,
        "stop_token_ids": [7],
    },
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": False},
    "ngram": {"drafter": "ngram", "num_speculative_tokens": 3},
    "model 1": {"drafter": "model", "num_speculative_tokens": 1},
    "model 5": {"drafter": "model", "num_speculative_tokens": 5},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_random_llama(folder / "target")
    return target, save_noisy_copy(target, folder / "draft", noise=0.03)


async def run_all(services: Services, **options: Any) -> dict[str, list[Generation]]:
    """All prompts in all modes, in one batch."""
    cases = [(name, prompt) for name in MODES for prompt in PROMPTS]
    results = await asyncio.gather(
        *(
            generate(
                services.client,
                prompt,
                **({"max_tokens": NUM_TOKENS, "ignore_eos": True} | options | MODES[name]),
            )
            for name, prompt in cases
        )
    )
    by_mode: dict[str, list[Generation]] = {name: [] for name in MODES}
    for (name, _), result in zip(cases, results, strict=True):
        by_mode[name].append(result)
    return by_mode


async def test_seeded_output_is_the_same_in_every_mode(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Coupled draws: with equal logits, equal ids, whatever was drafted."""
    async with running(models[0], tmp_path, draft_model=models[1], drafter="model") as services:
        neutral = await run_all(services, seed=11)
        for name, params in PARAMS.items():
            results = await run_all(services, seed=11, **params)
            expected = [(result.token_ids, result.text) for result in results["plain"]]
            for mode, generations in results.items():
                got = [(result.token_ids, result.text) for result in generations]
                assert got == expected, (name, mode)
            assert [ids for ids, _ in expected] != [
                result.token_ids for result in neutral["plain"]
            ], f"{name} changes nothing"
            accepted = sum(result.speculation.num_accepted_tokens for result in results["model 5"])
            assert accepted > 0, name


async def test_greedy_output_is_that_of_transformers(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words": ["t7", "t12"]}, {"bad_words_ids": [[7], [12]]}),
        ({"logit_bias": {5: 3.0}}, {"sequence_bias": [[[5], 3.0]]}),
        (
            {"allowed_token_ids": list(range(0, 64, 2))},
            {"suppress_tokens": list(range(1, 64, 2))},
        ),
        (
            {"min_tokens": 20, "stop_token_ids": list(range(20))},
            {"min_new_tokens": 20, "eos_token_id": list(range(20))},
        ),
    ]
    async with running(models[0], tmp_path, draft_model=models[1], drafter="model") as services:
        for ours, theirs in cases:
            expected = [
                tuple(
                    model.generate(
                        torch.tensor([prompt]),
                        do_sample=False,
                        max_new_tokens=NUM_TOKENS,
                        pad_token_id=0,
                        **theirs,
                    )[0, len(prompt) :].tolist()
                )
                for prompt in PROMPTS
            ]
            results = await run_all(services, temperature=0.0, **ours)
            for mode, generations in results.items():
                assert [result.token_ids for result in generations] == expected, (ours, mode)


async def test_what_is_forbidden_is_never_emitted(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    async with running(models[0], tmp_path, draft_model=models[1], drafter="model") as services:
        results = await run_all(services, temperature=3.0, allowed_token_ids=[4, 5, 6])
        tokens = {i for generations in results.values() for r in generations for i in r.token_ids}
        assert tokens == {4, 5, 6}
        results = await run_all(
            services, temperature=3.0, allowed_token_ids=[4, 5, 6, 7], bad_words=["t4 t5", "t6"]
        )
        for generations in results.values():
            for result in generations:
                text = f" {result.text} "
                assert "t4 t5 " not in text
                assert "t6" not in text


async def test_min_tokens_holds_back_every_end(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with running(models[0], tmp_path, draft_model=models[1], drafter="model") as services:
        ends = list(range(0, 64, 2))
        results = await run_all(services, min_tokens=8, stop_token_ids=ends)
        for generations in results.values():
            for result in generations:
                assert len(result.token_ids) > 8
                assert not set(result.token_ids[:8]) & set(ends)
        # A stop string that is complete earlier is text like any other.
        reference = await generate(
            services.client, PROMPTS[0], temperature=0.0, max_tokens=30, ignore_eos=True
        )
        third = f"t{reference.token_ids[2]}"
        kept = await generate(
            services.client,
            PROMPTS[0],
            temperature=0.0,
            max_tokens=30,
            ignore_eos=True,
            stop=[third],
            min_tokens=3,
        )
        assert kept.token_ids[:4] == reference.token_ids[:4]
        cut = await generate(
            services.client, PROMPTS[0], temperature=0.0, max_tokens=30, ignore_eos=True,
            stop=[third], min_tokens=2, include_stop_str_in_output=True,
        )  # fmt: skip
        assert cut.token_ids == reference.token_ids[:3]
        assert cut.text.endswith(third)


async def test_logprobs_are_those_of_the_raw_logits(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """For every token of every block, whatever shapes the distribution it was drawn from."""
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    async with running(models[0], tmp_path, draft_model=models[1], drafter="model") as services:
        for options in ({"temperature": 0.0}, {"seed": 5, "top_p": 0.7, "logit_bias": {2: 3.0}}):
            for num_top in (0, 3):
                results = await run_all(services, logprobs=num_top, **options)
                for generations in results.values():
                    for prompt, result in zip(PROMPTS, generations, strict=True):
                        ids = torch.tensor([[*prompt, *result.token_ids]])
                        with torch.inference_mode():
                            rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=1)
                        own = rows.gather(1, ids[0, len(prompt) :, None])[:, 0]
                        got = torch.tensor([token.logprob for token in result.tokens])
                        torch.testing.assert_close(got, own, rtol=0, atol=1e-4)
                        for row, token in zip(rows, result.tokens, strict=True):
                            best = row.topk(num_top)
                            assert [i for i, _ in token.top_logprobs] == best.indices.tolist()
                            values = torch.tensor([value for _, value in token.top_logprobs])
                            torch.testing.assert_close(values, best.values, rtol=0, atol=1e-4)
        without = await run_all(services, temperature=0.0)
        assert all(t.logprob is None for rs in without.values() for r in rs for t in r.tokens)
