"""Measures `training.write_data` against batched `generate` of transformers.

    python -m bench.write_data

The sides have the same weights and take turns step by step in one process, so that
other work on the machine slows them alike. `generate` continues a batch of prompts,
padded on the left, for the same number of tokens each, past any end of text: its
best case. `batch` continues the same prompts as far over our engine. `script` is the
command at work on as many sequences, prompts and answers as they come. Ratios are of
tokens per second: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging

from bench.command_line import positive_int, write_json
from bench.samples import ratios, spread
from orchestrator.tokenization import Tokenization
from specdec.models.loading import ModelError, resolve_model
from specdec.paged.loading import LoadedModel, load_paged_model, set_num_threads
from specdec.randomness import derive_keys
from specdec.telemetry.logging import setup_logging
from specdec.types import SamplingParams
from training.batch import Batch
from training.chat_turns import ChatTurns
from training.dataset import Dataset, read_conversations
from training.settings import WriteSettings
from training.writer import Writer

_BLOCK_SIZE = 16
_SPARE_BLOCKS = 512
_MANY = 1_000_000


class _Clock:
    """Tokens and time of one side."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    def run(self, step: Callable[[], int]) -> None:
        """Runs a step that returns its tokens."""
        started_s = time.perf_counter()
        self.num_tokens += step()
        self.seconds += time.perf_counter() - started_s


class _Turns(StoppingCriteria):
    """Lets the others take a step after each one of `generate`; it stops nothing."""

    def __init__(self, clock: _Clock, others: Callable[[], None]) -> None:
        self._clock = clock
        self._others = others
        self._resumed_s = time.perf_counter()

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object
    ) -> torch.BoolTensor:
        self._clock.num_tokens += len(input_ids)
        self._clock.seconds += time.perf_counter() - self._resumed_s
        self._others()
        self._resumed_s = time.perf_counter()
        return cast("torch.BoolTensor", torch.zeros(len(input_ids), dtype=torch.bool))


class Sides:
    """The same weights as transformers runs them, and over paged pools."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        """Loads them, and lets the script write until it has prompts for the others.

        Args:
            options: The command line.
            out: Folder of the script's data set.
        """
        self._options = options
        self._folder = resolve_model(options.model)
        self._turns = ChatTurns(self._folder)
        self._tokenization = Tokenization(self._folder)
        self._loaded = self._load()
        logging.disable_progress_bar()
        dtype = getattr(torch, options.dtype)
        self._stock: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype).eval()
        self._stock.generation_config.eos_token_id = None  # every side makes the same number
        settings = WriteSettings(
            out=out,
            num_conversations=_MANY,
            max_prompt_tokens=options.max_tokens,
            max_answer_tokens=options.max_tokens,
            batch_size=options.batch_size,
            dtype=options.dtype,
        )
        dataset = Dataset(out, {}, {}, shard_size=options.batch_size)
        self._writer = Writer(self._load(), self._tokenization, self._turns, dataset, settings)
        while dataset.num_conversations < options.batch_size:
            self._writer.step()
        written = list(read_conversations(out))[: options.batch_size]
        self._prompts = [list(conversation.prompt_ids) for conversation in written]

    def run(self, *, greedy: bool) -> dict[str, float]:
        """Continues all prompts; returns tokens/s by side."""
        clocks = {name: _Clock() for name in ("generate", "batch", "script")}
        batch = Batch(self._loaded, self._tokenization.tokenizer, self._options.batch_size)
        params = SamplingParams(temperature=0.0 if greedy else 1.0, ignore_eos=True)
        for index, prompt in enumerate(self._prompts):
            keys = derive_keys(0, choice=index)
            batch.start(index, prompt, params, keys, max_tokens=self._options.max_tokens)

        def step_others() -> None:
            if batch.num_running:
                clocks["batch"].run(lambda: _step(batch, batch.step))
            clocks["script"].run(lambda: _step(self._writer.batch, self._writer.step))

        self._generate(clocks["generate"], step_others, greedy=greedy)
        while batch.num_running:
            clocks["batch"].run(lambda: _step(batch, batch.step))
        return {name: clock.rate for name, clock in clocks.items()}

    def _generate(self, clock: _Clock, others: Callable[[], None], *, greedy: bool) -> None:
        width = max(map(len, self._prompts))
        pads = [width - len(prompt) for prompt in self._prompts]
        padded = [[0] * pad + prompt for pad, prompt in zip(pads, self._prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        self._stock.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=self._options.max_tokens,
            do_sample=not greedy,
            pad_token_id=0,
            stopping_criteria=[_Turns(clock, others)],
            **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        )

    def _load(self) -> LoadedModel:
        num_tokens = len(self._turns.user_opening_ids) + self._turns.num_closing_tokens
        blocks_each = (num_tokens + 2 * self._options.max_tokens) // _BLOCK_SIZE + 2
        return load_paged_model(
            str(self._folder),
            dtype=self._options.dtype,
            device="cpu",
            num_blocks=self._options.batch_size * blocks_each + _SPARE_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_sequences=self._options.batch_size,
        )


def _step(batch: Batch, step: Callable[[], object]) -> int:
    before = batch.num_decoded_tokens
    step()
    return batch.num_decoded_tokens - before


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when the model cannot be used.
    """
    options = _parse(argv)
    setup_logging("warning", "bench")
    set_num_threads(0)
    console = Console()
    runs: dict[str, list[dict[str, float]]] = {"greedy": [], "sampled": []}
    try:
        with tempfile.TemporaryDirectory() as out:
            sides = Sides(options, Path(out))
            for index in range(options.pairs):
                for kind in list(runs) if index % 2 == 0 else reversed(runs):
                    rates = sides.run(greedy=kind == "greedy")
                    runs[kind].append(rates)
                    shown = ", ".join(f"{side} {rate:.1f}" for side, rate in rates.items())
                    console.print(f"{kind}: {shown} tokens/s", highlight=False)
    except ModelError as error:
        print(f"bench.write_data: {error}", file=sys.stderr)
        return 1
    table = Table("speed", "median", "min", "max")
    for kind, turns in runs.items():
        for ours in ("batch", "script"):
            ratio = spread(ratios([r[ours] for r in turns], [r["generate"] for r in turns]))
            values = (f"{value:.2f}" for value in (ratio.median, ratio.low, ratio.high))
            table.add_row(f"{ours} / generate, {kind}", *values)
    console.print(table)
    if options.json is not None:
        write_json(options.json, {"options": vars(options), "runs": runs})
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.write_data", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--pairs", type=positive_int, default=3, help="turns of every side (3)")
    add("--batch-size", type=positive_int, default=32, help="sequences at once (32)")
    add("--max-tokens", type=positive_int, default=128, help="of prompts and of answers (128)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all sides")
    add("--model", default="default", help="default, a local folder, or a hub id")
    add("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
