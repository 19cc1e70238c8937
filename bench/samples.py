"""What is measured of one generation, and how ratios are summed up.

A machine's speed changes from minute to minute, so nothing here compares two
runs: sides take turns on the same prompts, each turn of all sides is a pair,
and a ratio is taken within a pair. Its spread over the pairs is what to trust.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generation of one side."""

    start_s: float
    """time.perf_counter() when it was asked for."""
    arrivals: tuple[tuple[float, int], ...]
    """(time.perf_counter(), tokens) of each piece of output, the first one's prefill included."""
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens made."""
        return sum(num_tokens for _, num_tokens in self.arrivals)

    @property
    def first_s(self) -> float:
        """time.perf_counter() of the first output."""
        return self.arrivals[0][0]

    @property
    def end_s(self) -> float:
        """time.perf_counter() of the last output."""
        return self.arrivals[-1][0]


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some values; NaN without any."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Sums values up.

    Args:
        values: One per pair; those that are not finite do not count.

    Returns:
        Median, least and greatest.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(statistics.median(finite), min(finite), max(finite))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divides pair by pair; NaN where there is nothing to divide by."""
    return [a / b if b else math.nan for a, b in zip(numerators, denominators, strict=True)]


def decode_rate(samples: Iterable[Sample]) -> float:
    """Tokens per second of generations made one after another, prefill left out.

    The clock of a generation runs from its first output to its last, and the
    tokens of the first output do not count.

    Args:
        samples: One side of one pair.

    Returns:
        Tokens/s; NaN when nothing follows the first outputs.
    """
    samples = list(samples)
    duration_s = sum(sample.end_s - sample.first_s for sample in samples)
    num_tokens = sum(sample.num_tokens - sample.arrivals[0][1] for sample in samples)
    return num_tokens / duration_s if duration_s > 0 else math.nan


def total_rate(samples: Iterable[Sample]) -> float:
    """Tokens per second of generations made one after another, prefill included."""
    samples = list(samples)
    duration_s = sum(sample.end_s - sample.start_s for sample in samples)
    return sum(sample.num_tokens for sample in samples) / duration_s


def typical_rate(turns: Sequence[Sequence[Sample]], *, with_prefill: bool = False) -> float:
    """Tokens per second when a burst of other work slows some turns down.

    A sum over prompts is as slow as its slowest part. Here the time of each
    prompt is the median over its turns.

    Args:
        turns: One side: per pair, its samples of the same prompts.
        with_prefill: Whether the clock starts with the request.

    Returns:
        Tokens/s; NaN when nothing follows the first outputs.
    """
    duration_s, num_tokens = 0.0, 0.0
    for same_prompt in zip(*turns, strict=True):
        starts_s = [s.start_s if with_prefill else s.first_s for s in same_prompt]
        durations_s = [s.end_s - start_s for s, start_s in zip(same_prompt, starts_s, strict=True)]
        skipped = [0 if with_prefill else s.arrivals[0][1] for s in same_prompt]
        counts = [s.num_tokens - n for s, n in zip(same_prompt, skipped, strict=True)]
        duration_s += statistics.median(durations_s)
        num_tokens += statistics.median(counts)
    return num_tokens / duration_s if duration_s > 0 else math.nan


def steady_rate(samples: Sequence[Sample]) -> float:
    """Tokens per second of concurrent generations while all of them decode.

    The clock runs from when the last one has its first output until the first
    one ends.

    Args:
        samples: Generations that ran at the same time.

    Returns:
        Tokens/s over all; NaN when they never decoded all at once.
    """
    begin_s = max(sample.first_s for sample in samples)
    end_s = min(sample.end_s for sample in samples)
    if end_s <= begin_s:
        return math.nan
    num_tokens = sum(n for s in samples for at_s, n in s.arrivals if begin_s < at_s <= end_s)
    return num_tokens / (end_s - begin_s)


def concurrent_rate(samples: Sequence[Sample]) -> float:
    """Tokens per second of concurrent generations, from the first request to the last token."""
    duration_s = max(s.end_s for s in samples) - min(s.start_s for s in samples)
    return sum(sample.num_tokens for sample in samples) / duration_s
