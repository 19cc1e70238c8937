"""What depends on the device, in seconds: `make test-gpu`, or SPECDEC_TEST_DEVICE=cpu to try it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services import running
from tests.toy_models import save_random_llama

DEVICE = os.environ.get("SPECDEC_TEST_DEVICE", "cuda")


@pytest.mark.parametrize("drafter", ["ngram", "model"])
async def test_greedy_ids_equal_transformers(drafter: str, tmp_path: Path) -> None:
    model = save_random_llama(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
    prompt = [5, 9, 5, 9, 5, 7, 3]
    expected = reference.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=32, do_sample=False
    )[0, len(prompt) :].tolist()
    settings = {"device": DEVICE}
    async with running(
        model,
        tmp_path / "traces",
        draft_model=model,
        drafter=drafter,
        target=settings,
        draft=settings,
    ) as services:
        for num_tokens in (0, 1, 5):
            generation = await services.client.generate(
                prompt, temperature=0, max_tokens=32, num_speculative_tokens=num_tokens
            ).collect()
            assert list(generation.token_ids) == expected


async def test_a_seeded_output_is_the_same_with_and_without_drafts(tmp_path: Path) -> None:
    model = save_random_llama(tmp_path / "model")
    settings = {"device": DEVICE}
    async with running(
        model,
        tmp_path / "traces",
        draft_model=model,
        drafter="model",
        target=settings,
        draft=settings,
    ) as services:
        outputs = {
            (
                await services.client.generate(
                    [1, 2, 3], seed=7, max_tokens=32, **options
                ).collect()
            ).token_ids
            for options in ({"speculation": False}, {"num_speculative_tokens": 4})
        }
    assert len(outputs) == 1
