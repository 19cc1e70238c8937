"""Measures prefill: prompt tokens per second until the first token.

    python -m bench.prefill

The services and stock transformers take turns on the same random prompts, each
of which is new to the prefix cache. The services' time includes both hops.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from bench import ours
from bench.command_line import make_parser, positive_int, write_json
from bench.prompts import Prompt
from bench.samples import Spread, ratios, spread
from bench.stock import StockModel
from specdec.client import AsyncClient, GenerationError
from specdec.models.loading import ModelError, load_tokenizer, resolve_model, vocab_size
from specdec.supervisor import DeploymentError

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One length of prompts. Rates are prompt tokens/s until the first token."""

    num_tokens: int
    ours: Spread
    transformers: Spread
    ratio: Spread
    """Ours / transformers, pair by pair."""


async def _ours_rate(client: AsyncClient, token_ids: list[int]) -> float:
    start_s = time.perf_counter()
    stream = client.generate(
        token_ids, temperature=0.0, max_tokens=1, ignore_eos=True, timeout_s=_TIMEOUT_S
    )
    await stream.collect()
    return len(token_ids) / (time.perf_counter() - start_s)


def _stock_rate(stock: StockModel, token_ids: list[int]) -> float:
    sample = stock.generate(Prompt("", tuple(token_ids)), 1)
    return len(token_ids) / (sample.first_s - sample.start_s)


async def measure(options: argparse.Namespace) -> list[Row]:
    """Runs the benchmark; prints what it finds."""
    folder = resolve_model(options.model)
    size = vocab_size(load_tokenizer(folder))
    rng = random.Random(0)
    rows = []
    async with (
        ours.deployment(folder, options.dtype) as deployment,
        AsyncClient(deployment.orchestrator_address) as client,
    ):
        stock = StockModel(folder, options.dtype)
        for num_tokens in options.lengths:
            rates: dict[str, list[float]] = {"ours": [], "transformers": []}
            for pair in range(options.pairs + 1):
                token_ids = [rng.randrange(size) for _ in range(num_tokens)]
                rate = await _ours_rate(client, token_ids)
                if pair:  # the first one warms both up
                    rates["ours"].append(rate)
                rate = _stock_rate(stock, token_ids)
                if pair:
                    rates["transformers"].append(rate)
            rows.append(
                Row(
                    num_tokens=num_tokens,
                    ours=spread(rates["ours"]),
                    transformers=spread(rates["transformers"]),
                    ratio=spread(ratios(rates["ours"], rates["transformers"])),
                )
            )
    table = Table("prompt", "ours, tokens/s", "transformers, tokens/s", "ours / transformers")
    for row in rows:
        low, high = row.ratio.low, row.ratio.high
        table.add_row(
            f"{row.num_tokens} tokens",
            f"{row.ours.median:.0f}",
            f"{row.transformers.median:.0f}",
            f"{row.ratio.median:.2f} ({low:.2f}-{high:.2f})",
        )
    Console().print(table)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when the model or the deployment fails.
    """
    parser = make_parser("bench.prefill", __doc__)
    add = parser.add_argument
    add("--lengths", type=positive_int, nargs="+", default=[128, 512, 1024], metavar="TOKENS")
    add("--pairs", type=positive_int, default=3, help="turns of every side (3)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of both sides")
    add("--model", default="default", help="default, a local folder, or a hub id")
    options = parser.parse_args(argv)
    try:
        rows = uvloop.run(measure(options))
    except (ModelError, DeploymentError, GenerationError, grpc.aio.AioRpcError) as error:
        print(f"bench.prefill: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        write_json(options.json, {"options": vars(options), "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
