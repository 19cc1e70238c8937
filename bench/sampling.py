"""Measures what follows the forward: from logits to results, as a share of a step.

    python -m bench.sampling

Random logits of a vocabulary's width go through the target's own code: bias and
masks, probabilities, acceptance, draws. The step they are compared with is the
forward of a model of that vocabulary on the same rows: SmolLM2 for 49k; for 152k
the linear layers of a 1.5B model alone, which is less than its forward. Both
sides take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.command_line import make_parser, positive_int, write_json
from specdec.models.loading import ModelError, load_model, resolve_model
from specdec.paged.attention import PackedSequence
from specdec.paged.model import PagedModel
from specdec.randomness import derive_keys
from specdec.types import SamplingParams
from target_service.acceptance import Chain, verify_chains

_NUM_DRAFTS = 5
_SMALL, _LARGE = 49_152, 151_936
_CONTEXT = 100
KINDS = {
    "T = 0": SamplingParams(temperature=0.0),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "T = 1, all": SamplingParams(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One vocabulary, batch size and kind of sampling. Times are medians, in ms."""

    vocab_size: int
    batch_size: int
    kind: str
    sampling_ms: float
    row_us: float
    """Per verified row, in µs."""
    step_ms: float
    share: float
    """Sampling / step."""


def _linears(num_rows: int) -> Callable[[], object]:
    """The linear layers of a 1.5B model of 152k tokens (28 layers of 1536, head included)."""
    hidden, intermediate, num_layers = 1536, 8960, 28
    shapes = [(hidden, 2048), (hidden, hidden), (hidden, 2 * intermediate), (intermediate, hidden)]

    def packed(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(columns, rows, dtype=torch.bfloat16) * rows**-0.5
        reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        return reordered

    # One layer's weights serve for all: what is measured reads them as often.
    layer = [
        (packed(*shape), torch.randn(num_rows, shape[0], dtype=torch.bfloat16)) for shape in shapes
    ]
    head = (packed(hidden, _LARGE), torch.randn(num_rows, hidden, dtype=torch.bfloat16))

    def run() -> None:
        for weight, x in [*(layer * num_layers), head]:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return run


def _forward(model: PagedModel, batch_size: int) -> Callable[[], object]:
    """One verify step of every sequence, 100 tokens behind it."""
    pool = model.block_pool
    tables = [
        pool.allocate(pool.num_blocks_for(_CONTEXT + _NUM_DRAFTS + 1)) for _ in range(batch_size)
    ]
    rows = list(range(10, 10 + _NUM_DRAFTS + 1))
    packed = [PackedSequence(rows, _CONTEXT, table) for table in tables]

    def run() -> object:
        return model.forward(packed, [len(rows)] * batch_size)

    return run


def _sampling(vocab_size: int, batch_size: int, params: SamplingParams) -> Callable[[], object]:
    logits = torch.randn(batch_size * (_NUM_DRAFTS + 1), vocab_size) * 3
    chains = [
        Chain(
            draft_token_ids=tuple(range(_NUM_DRAFTS)),
            draft_probs=(),
            params=params,
            keys=derive_keys(i, choice=0),
            base_length=_CONTEXT,
        )
        for i in range(batch_size)
    ]
    return lambda: verify_chains(logits, chains)


def _ms(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) * 1e3


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[Row]:
    """Runs the benchmark."""
    loaded = load_model(resolve_model("default"), torch.bfloat16, "cpu", report=lambda _: None)
    model = PagedModel(
        loaded, vocab_size=_SMALL, num_blocks=16 * 32, block_size=16, max_tokens=16 * 16 * 32
    )
    rows = []
    for vocab_size in (_SMALL, _LARGE):
        for batch_size in options.batch_sizes:
            num_rows = batch_size * (_NUM_DRAFTS + 1)
            held = model.block_pool.num_free
            step = _forward(model, batch_size) if vocab_size == _SMALL else _linears(num_rows)
            kinds = {kind: _sampling(vocab_size, batch_size, p) for kind, p in KINDS.items()}
            step_ms: list[float] = []
            sampling_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(options.turns + 1):
                times = {kind: _ms(run) for kind, run in kinds.items()}
                step_time = _ms(step)
                if turn:  # the first one warms up
                    step_ms.append(step_time)
                    for kind, value in times.items():
                        sampling_ms[kind].append(value)
            taken = held - model.block_pool.num_free
            model.block_pool.free(range(taken))
            for kind, values in sampling_ms.items():
                median, step_median = statistics.median(values), statistics.median(step_ms)
                rows.append(
                    Row(
                        vocab_size=vocab_size,
                        batch_size=batch_size,
                        kind=kind,
                        sampling_ms=median,
                        row_us=1e3 * median / num_rows,
                        step_ms=step_median,
                        share=median / step_median,
                    )
                )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when the model cannot be used.
    """
    parser = make_parser("bench.sampling", __doc__)
    add = parser.add_argument
    add("--batch-sizes", type=positive_int, nargs="+", default=[1, 8, 32], metavar="N")
    add("--turns", type=positive_int, default=7, help="turns of both sides (7)")
    options = parser.parse_args(argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        rows = measure(options)
    except ModelError as error:
        print(f"bench.sampling: {error}", file=sys.stderr)
        return 1
    table = Table("vocabulary", "batch", "sampling", "per row", "total", "step", "share")
    for row in rows:
        table.add_row(
            f"{row.vocab_size:,}",
            str(row.batch_size),
            row.kind,
            f"{row.row_us:.0f} µs",
            f"{row.sampling_ms:.1f} ms",
            f"{row.step_ms:.0f} ms",
            f"{row.share:.1%}",
        )
    Console().print(table)
    if options.json is not None:
        write_json(options.json, {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
