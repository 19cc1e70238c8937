"""Prometheus metrics of one service, over HTTP.

What a service counts anyway is read when a scrape asks for it; only histograms
are fed on the way of a token. Names are vLLM's, with the prefix `specdec_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "specdec_"

_POLL_S = 0.05

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
)  # fmt: skip
"""Upper bounds of latency histograms, in s."""


class MetricsServer:
    """Serves one service's metrics on /metrics."""

    def __init__(self) -> None:
        """Listens on nothing yet."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._server: WSGIServer | None = None

    def collect_from(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Adds metrics that are read at each scrape, on the server's thread.

        Args:
            collect: Makes them; must not block.
        """
        self.registry.register(_FunctionCollector(collect))

    def start(self, host: str, port: int) -> int:
        """Listens.

        Args:
            host: Address to listen on.
            port: TCP port; 0 picks a free one.

        Returns:
            The port.

        Raises:
            OSError: If the port is taken.
        """
        app = make_wsgi_app(self.registry)
        self._server = make_server(host, port, app, _Server, _Handler)
        # Not the library's own thread: that takes half a second to stop.
        serve = self._server.serve_forever
        Thread(target=serve, args=(_POLL_S,), name="metrics", daemon=True).start()
        return self._server.server_port

    def stop(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: scrapes are no news."""


class _FunctionCollector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return []  # else registering would collect, before the service has loaded


def gauge(name: str, text: str, value: float) -> Metric:
    """A value that goes up and down.

    Args:
        name: Without the prefix.
        text: What it is, with its unit.
        value: The value now.

    Returns:
        The metric.
    """
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """A count since the start; as `gauge`, the name without `_total`."""
    return CounterMetricFamily(PREFIX + name, text, value=value)


def labelled_counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Counts since the start by one label; the name without `_total`.

    Args:
        name: Without the prefix.
        text: What is counted.
        label: Name of the label.
        values: Count by the label's value.

    Returns:
        The metric.
    """
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
