"""What the orchestrator counts over all requests.

The counts of rounds are the same calls with the same numbers as each request's
own statistics, so that they add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric

from orchestrator.generation import Clock
from orchestrator.sequence import Sequence, SpeculationStats
from specdec.telemetry.metrics import (
    LATENCY_BUCKETS_S,
    PREFIX,
    counter,
    labelled_counter,
)


class RequestMetrics:
    """Counts and times of Generate."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Adds its histograms to a registry."""
        self.rounds = SpeculationStats()
        """Of all requests, over delivered tokens."""
        self._num_ended: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=LATENCY_BUCKETS_S, registry=registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token, in s."
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Mean time between a request's tokens, in s."
        )
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._total = histogram("e2e_request_latency_seconds", "From arrival to the end, in s.")

    def count_end(self, sequence: Sequence, clock: Clock) -> None:
        """Counts a request that ended, in whatever way.

        Args:
            sequence: At its end.
            clock: The request's times.
        """
        finish = sequence.finish
        self._num_ended["aborted" if finish is None else finish.reason.value] += 1
        num_tokens = sequence.num_completion_tokens
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self._num_cached_tokens += sequence.num_cached_tokens
        self._num_completion_tokens += num_tokens
        times = clock.timing(num_tokens)
        self._total.observe(times.total_ms / 1e3)
        if num_tokens:
            self._first_token.observe(times.time_to_first_token_ms / 1e3)
            self._queue.observe(times.queue_ms / 1e3)
        if num_tokens > 1:
            self._inter_token.observe(times.mean_inter_token_ms / 1e3)

    def collect(self) -> Iterable[Metric]:
        """Reads the counts."""
        rounds = self.rounds
        yield labelled_counter(
            "requests", "Requests that ended, by finish reason.", "reason", self._num_ended
        )
        yield counter("prompt_tokens", "Tokens of prompts.", self._num_prompt_tokens)
        yield counter(
            "cached_prompt_tokens", "Those whose KV a target had.", self._num_cached_tokens
        )
        yield counter("generation_tokens", "Tokens delivered.", self._num_completion_tokens)
        yield counter("spec_decode_num_drafts", "Rounds with drafts.", rounds.num_drafted_rounds)
        yield counter("spec_decode_num_draft_tokens", "Tokens drafted.", rounds.num_draft_tokens)
        yield counter(
            "spec_decode_num_accepted_tokens", "Drafts delivered.", rounds.num_accepted_tokens
        )
        yield labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts delivered, by position in the proposal.",
            "position",
            {str(i): n for i, n in enumerate(rounds.num_accepted_tokens_per_position)},
        )
