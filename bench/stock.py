"""The side to compare with: `generate` of transformers, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from bench.prompts import Prompt
from bench.samples import Sample

# What the services' own prompt lookup does: up to 5 tokens after up to 4 that match.
_LOOKUP = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 4}


class StockModel:
    """A model as transformers runs it, with its defaults."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Loads it.

        Args:
            folder: The model's folder.
            dtype: Name of the compute type.
        """
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # every side makes the same number

    def generate(self, prompt: Prompt, max_tokens: int, *, lookup: bool = False) -> Sample:
        """Generates greedily, past any end of text.

        Args:
            prompt: What to continue.
            max_tokens: Tokens to make.
            lookup: Whether to speculate by prompt lookup.

        Returns:
            When its tokens came.
        """
        input_ids = torch.tensor([prompt.token_ids])
        clock = _Clock()
        start_s = time.perf_counter()
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            **(_LOOKUP if lookup else {}),
        )
        return Sample(start_s=start_s, arrivals=tuple(clock.arrivals[1:]))

    def generate_batch(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Sample]:
        """Generates greedily for several prompts at once, padded to the longest.

        Args:
            prompts: What to continue.
            max_tokens: Tokens to make of each.

        Returns:
            When the tokens of each came.
        """
        longest = max(len(prompt.token_ids) for prompt in prompts)
        padding = [longest - len(prompt.token_ids) for prompt in prompts]
        rows = [[0] * n + list(p.token_ids) for n, p in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        clock = _StepClock()
        start_s = time.perf_counter()
        self._model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        sample = Sample(start_s=start_s, arrivals=tuple((at_s, 1) for at_s in clock.steps_s))
        return [sample] * len(prompts)


class _StepClock(StoppingCriteria):
    """Notes when each step's tokens are there; never stops."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object
    ) -> torch.BoolTensor:
        self.steps_s.append(time.perf_counter())
        return cast("torch.BoolTensor", torch.zeros(len(input_ids), dtype=torch.bool))


class _Clock(BaseStreamer):
    """Notes when tokens come; the prompt comes first."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass
