"""The draft service, put together."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from draft_service.drafter import Drafter
from draft_service.engine import DraftEngine
from draft_service.model_drafter import ModelDrafter
from draft_service.ngram_drafter import NgramDrafter
from draft_service.servicer import DraftFacts, DraftServicer
from draft_service.settings import DraftSettings
from specdec.models.loading import ModelError
from specdec.paged.loading import load_paged_model, set_num_threads
from specdec.rpc.server import GrpcServer
from specdec.rpc.service import Service, StartError
from specdec.telemetry.metrics import counter, gauge
from specdec.v1 import draft_pb2_grpc


class DraftService(Service):
    """Loads the drafters and serves their Propose stream."""

    name = "draft_service"
    service_names = ("specdec.v1.DraftService",)

    engine: DraftEngine

    def __init__(self, settings: DraftSettings) -> None:
        """Starts nothing yet.

        Args:
            settings: Validated settings.
        """
        super().__init__(settings)
        self._settings = settings
        self._servicer = DraftServicer()

    def register(self, server: GrpcServer) -> None:
        """Adds the servicer."""
        server.add(
            lambda grpc_server: draft_pb2_grpc.add_DraftServiceServicer_to_server(
                self._servicer, grpc_server
            )
        )

    def load(self) -> None:
        """Loads the draft model, if there is one, and makes the engine."""
        settings = self._settings
        set_num_threads(settings.num_threads)
        drafters: list[Drafter] = [NgramDrafter(settings.max_ngram, settings.ngram_min_acceptance)]
        self._facts = DraftFacts(drafters=("ngram",))
        if settings.model is not None:
            try:
                loaded = load_paged_model(
                    settings.model,
                    dtype=settings.dtype,
                    device=settings.device,
                    num_blocks=settings.num_blocks,
                    block_size=settings.block_size,
                    max_sequences=settings.max_batch_size,
                )
            except ModelError as error:
                raise StartError(str(error)) from error
            drafters.append(
                ModelDrafter(
                    loaded,
                    max_prefill_tokens=settings.max_prefill_tokens,
                    sparse_support=settings.sparse_support,
                )
            )
            names = ("model", "ngram") if settings.drafter == "model" else ("ngram", "model")
            self._facts = DraftFacts(
                drafters=names,
                model=settings.model,
                token_table_digest=loaded.token_table_digest,
                vocab_size=loaded.model.vocab_size,
                context_size=loaded.context_size,
                pool=loaded.model.block_pool,
            )
        self.engine = DraftEngine(
            drafters, max_batch_size=settings.max_batch_size, tracing=self.tracing
        )

    def collect_metrics(self) -> Iterable[Metric]:
        """Reads the engine's gauges and counts."""
        engine, pool = self.engine, self._facts.pool
        yield gauge("num_sequences", "Sequences held.", engine.num_sequences)
        yield gauge("num_sessions", "Orchestrators connected.", engine.num_sessions)
        yield counter("steps", "Draft steps.", engine.num_steps)
        if pool is not None:
            usage = 1 - pool.num_free / pool.num_blocks
            yield gauge("kv_cache_usage_ratio", "KV blocks held / all.", usage)
            yield gauge("num_cached_blocks", "KV blocks in the prefix cache.", pool.num_cached)

    async def begin(self) -> None:
        """Starts the engine."""
        self.engine.start()
        self._servicer.serve(self.engine, self._facts)

    async def drain(self) -> None:
        """Refuses new sessions."""
        self._servicer.drain()

    async def close(self) -> None:
        """Stops the engine."""
        self.engine.stop()
