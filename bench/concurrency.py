"""Measures many streams at once: the services against transformers' batched `generate`.

    python -m bench.concurrency --prompts mt_bench.jsonl

For each number of streams, all sides take turns: the services plainly, the
services with prompt-lookup drafts, and one padded batch of transformers, which
has to be complete before it starts. Everything is greedy and past any end of
text. A rate counts all tokens from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from bench import ours
from bench.command_line import make_parser, positive_int, write_json
from bench.prompts import DEFAULT_FILE, Prompt, choose, load_prompts
from bench.samples import Sample, Spread, concurrent_rate, ratios, spread
from bench.stock import StockModel
from orchestrator.tokenization import Tokenization
from specdec.client import AsyncClient, GenerationError
from specdec.models.loading import ModelError, resolve_model
from specdec.supervisor import DeploymentError

SIDES = ("transformers", "plain", "ngram")
_WARM_UP_TOKENS = 8
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of streams."""

    num_streams: int
    rates: dict[str, Spread]
    """By side: tokens/s over all streams."""
    ratios: dict[str, Spread]
    """By what is compared, pair by pair."""
    first_token_ms: dict[str, float]
    """By side: median over streams and pairs."""
    inter_token_ms: dict[str, float]
    """By side: median over streams and pairs of the mean time between tokens."""


def make_row(num_streams: int, turns: dict[str, list[list[Sample]]]) -> Row:
    """Sums one number of streams up.

    Args:
        num_streams: Streams at once.
        turns: By side: per pair, the streams' samples.

    Returns:
        The row.
    """
    rates = {side: [concurrent_rate(samples) for samples in turns[side]] for side in SIDES}
    pairs = [("plain", "transformers"), ("ngram", "plain"), ("ngram", "transformers")]
    every = {side: [sample for samples in turns[side] for sample in samples] for side in SIDES}
    return Row(
        num_streams=num_streams,
        rates={side: spread(rates[side]) for side in SIDES},
        ratios={f"{a} / {b}": spread(ratios(rates[a], rates[b])) for a, b in pairs},
        first_token_ms={
            side: statistics.median(1e3 * (s.first_s - s.start_s) for s in every[side])
            for side in SIDES
        },
        inter_token_ms={
            side: statistics.median(
                1e3 * (s.end_s - s.first_s) / (s.num_tokens - s.arrivals[0][1]) for s in every[side]
            )
            for side in SIDES
        },
    )


async def run_turn(
    side: str, stock: StockModel, client: AsyncClient, prompts: list[Prompt], max_tokens: int
) -> list[Sample]:
    """Lets one side generate all streams at once."""
    await asyncio.sleep(_PAUSE_S)
    if side == "transformers":
        return stock.generate_batch(prompts, max_tokens)
    return await asyncio.gather(
        *(
            ours.generate(client, prompt, max_tokens, speculation=side == "ngram")
            for prompt in prompts
        )
    )


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Prints the tables."""
    table = Table("streams", *(f"{side}, tokens/s" for side in SIDES), *rows[0].ratios)
    for row in rows:
        table.add_row(
            str(row.num_streams),
            *(f"{row.rates[side].median:.1f}" for side in SIDES),
            *(
                f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"
                for value in row.ratios.values()
            ),
        )
    console.print(table)
    table = Table(
        "streams",
        *(f"{side}, first token" for side in SIDES),
        *(f"{side}, between tokens" for side in SIDES),
    )
    for row in rows:
        times = [row.first_token_ms[side] for side in SIDES]
        times += [row.inter_token_ms[side] for side in SIDES]
        table.add_row(str(row.num_streams), *(f"{value:.0f} ms" for value in times))
    console.print(table)


async def measure(options: argparse.Namespace) -> list[Row]:
    """Runs the benchmark; prints what it finds."""
    folder = resolve_model(options.model)
    tokenization = Tokenization(folder)
    prompts = load_prompts(options.prompts, tokenization, options.max_prompt_tokens)
    rows = []
    async with (
        ours.deployment(folder, options.dtype) as deployment,
        AsyncClient(deployment.orchestrator_address) as client,
    ):
        stock = StockModel(folder, options.dtype)
        for side in SIDES:
            await run_turn(side, stock, client, prompts[:2], _WARM_UP_TOKENS)
        for num_streams in options.streams:
            streams = [prompts[i % len(prompts)] for i in range(num_streams)]
            streams = choose(prompts, num_streams) if num_streams <= len(prompts) else streams
            turns: dict[str, list[list[Sample]]] = {side: [] for side in SIDES}
            for pair in range(options.pairs):
                first = pair % len(SIDES)
                for side in SIDES[first:] + SIDES[:first]:
                    samples = await run_turn(side, stock, client, streams, options.max_tokens)
                    turns[side].append(samples)
            rows.append(make_row(num_streams, turns))
    print_rows(rows, Console(width=160))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when the model or the deployment fails.
    """
    parser = make_parser("bench.concurrency", __doc__)
    add = parser.add_argument
    add("--prompts", type=Path, default=DEFAULT_FILE, help="JSON lines with turns")
    add("--streams", type=positive_int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    add("--pairs", type=positive_int, default=3, help="turns of every side (3)")
    add("--max-tokens", type=positive_int, default=64, help="tokens per generation (64)")
    add("--max-prompt-tokens", type=positive_int, default=1500, help="longer ones are cut (1500)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of both sides")
    add("--model", default="default", help="default, a local folder, or a hub id")
    options = parser.parse_args(argv)
    try:
        rows = uvloop.run(measure(options))
    except (ModelError, DeploymentError, GenerationError, grpc.aio.AioRpcError, OSError) as error:
        print(f"bench.concurrency: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        write_json(options.json, {"options": vars(options), "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
