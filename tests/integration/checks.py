"""What the end-to-end tests share: references, refusals, idle gauges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.client import AsyncClient, Generation, GenerationError, Prompt
from tests.services import Services


def reference_ids(
    folder: Path, prompts: Iterable[Sequence[int]], num_tokens: int
) -> list[tuple[int, ...]]:
    """What stock transformers generates greedily in float32.

    Args:
        folder: The model's folder.
        prompts: Token ids of each prompt.
        num_tokens: Most tokens generated.

    Returns:
        The new ids of each prompt, EOS included.
    """
    torch.set_num_threads(1)  # as all of these tests: threads that spin slow each other down
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos_token_id = AutoTokenizer.from_pretrained(folder).eos_token_id
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = eos_token_id
    references = []
    for prompt in prompts:
        input_ids = torch.tensor([list(prompt)])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        references.append(tuple(output[0, len(prompt) :].tolist()))
    return references


async def generate(client: AsyncClient, prompt: Prompt, **options: Any) -> Generation:
    """Runs one generation to its end."""
    return await client.generate(prompt, **options).collect()


async def greedy_ids(client: AsyncClient, prompt: Prompt, **options: Any) -> tuple[int, ...]:
    """The ids of one greedy generation."""
    return (await generate(client, prompt, temperature=0.0, **options)).token_ids


async def error_of(client: AsyncClient, prompt: Prompt, **options: Any) -> GenerationError:
    """The error one generation ends with."""
    with pytest.raises(GenerationError) as raised:
        await generate(client, prompt, **options)
    return raised.value


async def eventually(holds: Callable[[], object], what: object, timeout_s: float = 2.0) -> None:
    """Waits until something holds.

    Args:
        holds: Asked again and again.
        what: Is called for the message if it never does.
        timeout_s: Longest wait, in s.
    """
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


async def becomes_idle(services: Services) -> None:
    """Within 2 s everything that belonged to requests is given back, and the pools add up."""

    def gauges() -> dict[str, int]:
        target, draft = services.target, services.draft
        gauges = {
            "target sequences": target.engine.num_sequences,
            "target blocks in use": target.engine._pool.num_blocks - target.engine.num_free_blocks,
            "orchestrator RPCs": services.orchestrator.active_rpcs.num_active,
            "orchestrator spans": services.orchestrator.tracing.num_open_spans,
            "target spans": target.tracing.num_open_spans,
        }
        if draft is not None:
            gauges["draft sequences"] = draft.engine.num_sequences
            gauges["draft spans"] = draft.tracing.num_open_spans
            if "model" in draft.engine.drafters:
                pool = draft.engine.drafters["model"]._pool
                gauges["draft blocks in use"] = pool.num_blocks - pool.num_free
        return gauges

    end_s = time.monotonic() + 2.0
    while any(gauges().values()):
        assert time.monotonic() < end_s, f"still in use: {gauges()}"
        await asyncio.sleep(0.01)
    services.target.engine.check_integrity()
    if services.draft is not None and "model" in services.draft.engine.drafters:
        services.draft.engine.drafters["model"].check_integrity()
