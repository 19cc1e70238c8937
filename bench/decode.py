"""Measures decoding: stock transformers, the services plainly, the services with drafts.

    python -m bench.decode --prompts mt_bench.jsonl --prompts humaneval.jsonl

It starts the three services as processes of their own, like `specdec up`, and
lets the sides take turns, prompt by prompt: a stream at a time, greedy, past
any end of text, so that all make the same number of tokens. Then many streams
run at once. Ratios are of speed: above 1 the side named first is faster. The
median, least and greatest are over the pairs; `typical` takes each prompt's
median time over the pairs first, which holds on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench import ours
from bench import samples as arithmetic
from bench.command_line import positive_int, write_json
from bench.prompts import DEFAULT_FILE, Prompt, choose, load_prompts
from bench.samples import Sample, Spread, ratios, spread
from bench.stock import StockModel
from orchestrator.tokenization import Tokenization
from specdec.client import AsyncClient, GenerationError
from specdec.models.loading import ModelError, resolve_model
from specdec.supervisor import DeploymentError

_WARM_UP_TOKENS = 8
# Compute threads of one side spin for some ms after their last work.
_PAUSE_S = 0.05


@dataclass(slots=True)
class Pair:
    """One turn of every side on the same prompts."""

    alone: dict[str, list[Sample]] = field(default_factory=dict)
    """By side: its generations, one after another."""
    together: dict[str, list[Sample]] = field(default_factory=dict)
    """By side: generations that ran at the same time."""
    idle_cpu: float = 0.0
    """CPU time of the services per second while transformers ran, in cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one prompt set showed. Rates are tokens/s."""

    name: str
    num_prompts: int
    mean_prompt_tokens: float
    ratios: dict[str, Spread]
    """By what is compared, over the pairs."""
    typical: dict[str, float]
    """The same from each prompt's median time over its turns: bursts of other work count less."""
    rates: dict[str, Spread]
    """By side: decoding one stream."""
    first_token_ms: dict[str, Spread]
    """By side: time to the first token."""
    mean_acceptance_length: float
    """Tokens per round with drafts."""
    acceptance_rate: float
    idle_cpu: Spread
    """Cores the services used while transformers ran; more than nearly 0 is unfair."""


class Bench:
    """The sides, and how they take turns."""

    def __init__(
        self, stock: StockModel, client: AsyncClient, *, max_tokens: int, lookup: bool
    ) -> None:
        """Takes loaded and serving sides.

        Args:
            stock: The model in this process.
            client: Of the services.
            max_tokens: Tokens per generation.
            lookup: Whether the prompt lookup of transformers takes part.
        """
        self._stock = stock
        self._client = client
        self._max_tokens = max_tokens
        self.sides = ["transformers", "plain", "ngram", *(["lookup"] if lookup else [])]

    async def warm_up(self, prompt: Prompt) -> None:
        """Lets every side run once, so that nothing is first met while the clock runs."""
        for side in self.sides:
            await self._generate(side, prompt, _WARM_UP_TOKENS)

    async def run_pair(self, index: int, prompts: list[Prompt], streams: list[Prompt]) -> Pair:
        """Lets every side take its turn.

        Args:
            index: Of the pair; shifts who goes first.
            prompts: For one stream at a time.
            streams: For all streams at once, one each; fewer than 2 leave that out.

        Returns:
            The samples.
        """
        pair = Pair({side: [] for side in self.sides}, {})
        idle_s = used_s = 0.0
        for number, prompt in enumerate(prompts):
            first = (index + number) % len(self.sides)
            for side in self.sides[first:] + self.sides[:first]:
                await asyncio.sleep(_PAUSE_S)
                before_s = _services_cpu_s()
                sample = await self._generate(side, prompt, self._max_tokens)
                pair.alone[side].append(sample)
                if side in ("transformers", "lookup"):
                    used_s += _services_cpu_s() - before_s
                    idle_s += sample.end_s - sample.start_s
        pair.idle_cpu = used_s / idle_s
        if len(streams) > 1:
            modes = ("plain", "ngram") if index % 2 == 0 else ("ngram", "plain")
            for side in modes:
                await asyncio.sleep(_PAUSE_S)
                runs = (self._generate(side, prompt, self._max_tokens) for prompt in streams)
                pair.together[side] = await asyncio.gather(*runs)
        return pair

    async def _generate(self, side: str, prompt: Prompt, max_tokens: int) -> Sample:
        if side in ("transformers", "lookup"):
            # On this thread: nothing else is to run meanwhile.
            return self._stock.generate(prompt, max_tokens, lookup=side == "lookup")
        return await ours.generate(self._client, prompt, max_tokens, speculation=side == "ngram")


def make_report(name: str, prompts: list[Prompt], pairs: Sequence[Pair]) -> Report:
    """Sums a prompt set up.

    Args:
        name: Of the set.
        prompts: Those of one stream.
        pairs: At least one, all with the same sides.

    Returns:
        The report.
    """
    sides = list(pairs[0].alone)
    decode = {s: [arithmetic.decode_rate(pair.alone[s]) for pair in pairs] for s in sides}
    total = {s: [arithmetic.total_rate(pair.alone[s]) for pair in pairs] for s in sides}
    compared = [("plain", "transformers"), ("ngram", "plain"), ("ngram", "transformers")]
    if "lookup" in sides:
        compared += [("lookup", "transformers"), ("ngram", "lookup")]
    turns = {s: [pair.alone[s] for pair in pairs] for s in sides}
    typical_decode = {s: arithmetic.typical_rate(turns[s]) for s in sides}
    typical_total = {s: arithmetic.typical_rate(turns[s], with_prefill=True) for s in sides}
    by_name: dict[str, list[float]] = {}
    typical: dict[str, float] = {}
    for kind, rates, typical_rates in (
        ("decode", decode, typical_decode),
        ("end to end", total, typical_total),
    ):
        for a, b in compared:
            key = f"{kind}: {a} / {b}"
            by_name[key] = ratios(rates[a], rates[b])
            typical[key] = ratios([typical_rates[a]], [typical_rates[b]])[0]
    for side, streams in pairs[0].together.items():
        steady = [arithmetic.steady_rate(pair.together[side]) for pair in pairs]
        whole = [arithmetic.concurrent_rate(pair.together[side]) for pair in pairs]
        for kind, rate, alone, typical_alone in (
            ("decode", steady, decode[side], typical_decode[side]),
            ("end to end", whole, total[side], typical_total[side]),
        ):
            key = f"{kind}: {len(streams)} streams / 1, {side}"
            by_name[key] = ratios(rate, alone)
            # The median of times, as in the rate it is divided by.
            typical[key] = 1 / spread(1 / r for r in rate).median / typical_alone
    drafted = [sample for pair in pairs for sample in pair.alone["ngram"]]
    num_draft_tokens = sum(sample.num_draft_tokens for sample in drafted)
    num_rounds = sum(sample.num_rounds for sample in drafted)
    return Report(
        name=name,
        num_prompts=len(prompts),
        mean_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts) / len(prompts),
        ratios={key: spread(values) for key, values in by_name.items()},
        typical=typical,
        rates={side: spread(decode[side]) for side in sides},
        first_token_ms={
            side: spread(1e3 * (s.first_s - s.start_s) for pair in pairs for s in pair.alone[side])
            for side in sides
        },
        mean_acceptance_length=sum(s.num_tokens for s in drafted) / max(1, num_rounds),
        acceptance_rate=sum(s.num_accepted_tokens for s in drafted) / max(1, num_draft_tokens),
        idle_cpu=spread(pair.idle_cpu for pair in pairs),
    )


def print_report(report: Report, console: Console) -> None:
    """Prints a prompt set's tables."""
    prompts = f"{report.num_prompts} prompts of {report.mean_prompt_tokens:.0f} tokens"
    console.print(f"{report.name}: {prompts}", highlight=False)
    table = Table("speed", "typical", "median", "min", "max")
    for key, ratio in report.ratios.items():
        values = (report.typical[key], ratio.median, ratio.low, ratio.high)
        table.add_row(key, *(f"{value:.2f}" for value in values))
    console.print(table)
    for side, rate in report.rates.items():
        first_ms = report.first_token_ms[side].median
        console.print(
            f"  {side}: {rate.median:.1f} tokens/s ({rate.low:.1f} to {rate.high:.1f}),"
            f" first token after {first_ms:.0f} ms",
            highlight=False,
        )
    console.print(
        f"  ngram: {report.mean_acceptance_length:.2f} tokens per round,"
        f" {report.acceptance_rate:.0%} of the drafts accepted\n"
        f"  services while transformers ran: {report.idle_cpu.median:.3f} cores\n",
        highlight=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when a model, a prompt file or the deployment fails.
    """
    options = _parse(argv)
    try:
        reports = asyncio.run(_run(options))
    except (ModelError, DeploymentError, GenerationError, OSError, ValueError) as error:
        print(f"bench.decode: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        figures = [asdict(report) for report in reports]
        write_json(options.json, {"options": vars(options), "reports": figures})
    return 0


async def _run(options: argparse.Namespace) -> list[Report]:
    folder = resolve_model(options.model)
    tokenization = Tokenization(folder)
    files = options.prompts or [DEFAULT_FILE]
    sets = {file: load_prompts(file, tokenization, options.max_prompt_tokens) for file in files}
    deployment = ours.deployment(folder, options.dtype)
    console, reports = Console(), []
    async with deployment, AsyncClient(deployment.orchestrator_address) as client:
        stock = StockModel(folder, options.dtype)
        bench = Bench(stock, client, max_tokens=options.max_tokens, lookup=options.lookup)
        await bench.warm_up(sets[files[0]][0])
        for file, all_prompts in sets.items():
            prompts = choose(all_prompts, options.num_prompts)
            streams = choose(all_prompts, options.streams)
            pairs = [await bench.run_pair(i, prompts, streams) for i in range(options.pairs)]
            reports.append(make_report(file.stem, prompts, pairs))
            print_report(reports[-1], console)
    return reports


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--prompts", type=Path, action="append", help="JSON lines with turns; may be repeated")
    add("--pairs", type=positive_int, default=5, help="turns of every side (5)")
    add("--num-prompts", type=positive_int, default=4, help="prompts of each set, per turn (4)")
    add("--max-tokens", type=positive_int, default=64, help="tokens per generation (64)")
    add("--max-prompt-tokens", type=positive_int, default=1500, help="longer ones are cut (1500)")
    add("--streams", type=positive_int, default=8, help="concurrent streams; 1 for none (8)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of both sides")
    add("--model", default="default", help="default, a local folder, or a hub id")
    add("--lookup", action="store_true", help="let transformers' prompt lookup take part")
    add("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(argv)


def _services_cpu_s() -> float:
    """CPU time the services have used, in s."""
    total_s = 0.0
    for process in psutil.Process().children():
        times = process.cpu_times()
        total_s += times.user + times.system
    return total_s


if __name__ == "__main__":
    sys.exit(main())
