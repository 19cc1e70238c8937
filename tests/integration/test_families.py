"""Families through the services: a draft of another family, and a target with windows."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.checks import generate, reference_ids
from tests.services import running
from tests.toy_models import save_noisy_copy, save_random_family

PROMPTS = [[random.Random(seed).randrange(64) for _ in range(5 + 9 * seed)] for seed in range(4)]
NUM_TOKENS = 40


@pytest.mark.parametrize(
    ("target", "draft"),
    [("llama", "gpt_neox"), ("gpt2", "llama"), ("mistral", "mistral"), ("gemma2", "opt")],
)
async def test_drafts_of_any_family_leave_the_output_as_it_is(
    target: str, draft: str, tmp_path: Path
) -> None:
    target_model = save_random_family(tmp_path / "target", target)
    if draft == target:  # drafts that are sometimes right
        draft_model = save_noisy_copy(target_model, tmp_path / "draft", noise=0.02)
    else:
        draft_model = save_random_family(tmp_path / "draft", draft, seed=1)
    references = reference_ids(target_model, PROMPTS, NUM_TOKENS)
    async with running(
        target_model, tmp_path / "traces", draft_model=draft_model, drafter="model"
    ) as services:
        for drafter in ("model", "ngram"):
            results = await asyncio.gather(
                *(
                    generate(
                        services.client,
                        prompt,
                        temperature=0.0,
                        max_tokens=NUM_TOKENS,
                        drafter=drafter,
                    )
                    for prompt in PROMPTS
                )
            )
            assert [result.token_ids for result in results] == references
            if drafter == "model":
                assert sum(result.speculation.num_draft_tokens for result in results) > 0
