"""The target service, put together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from prometheus_client.metrics_core import Metric

from specdec.models.loading import ModelError, load_tokenizer, model_fingerprint
from specdec.paged.loading import load_paged_model, set_num_threads
from specdec.rpc.server import GrpcServer
from specdec.rpc.service import Service, StartError
from specdec.telemetry.metrics import counter, gauge
from specdec.v1 import target_pb2_grpc
from target_service.engine import TargetEngine
from target_service.servicer import TargetFacts, TargetServicer
from target_service.settings import TargetSettings


class TargetService(Service):
    """Loads the target and serves its Verify stream."""

    name = "target_service"
    service_names = ("specdec.v1.TargetService",)

    engine: TargetEngine

    def __init__(self, settings: TargetSettings, *, check_integrity: bool = False) -> None:
        """Starts nothing yet.

        Args:
            settings: Validated settings.
            check_integrity: Whether to check the pool after every step (tests).
        """
        super().__init__(settings)
        self._settings = settings
        self._check_integrity = check_integrity
        self._servicer = TargetServicer()

    def register(self, server: GrpcServer) -> None:
        """Adds the servicer."""
        server.add(
            lambda grpc_server: target_pb2_grpc.add_TargetServiceServicer_to_server(
                self._servicer, grpc_server
            )
        )

    def load(self) -> None:
        """Loads the model and makes the engine."""
        settings = self._settings
        set_num_threads(settings.num_threads)
        try:
            loaded = load_paged_model(
                settings.model,
                dtype=settings.dtype,
                device=settings.device,
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
                max_sequences=settings.max_batch_size,
                prefix_cache=settings.prefix_cache,
            )
        except ModelError as error:
            raise StartError(str(error)) from error
        dtype = getattr(torch, settings.dtype)
        tokenizer = load_tokenizer(loaded.folder)
        self._facts = TargetFacts(
            model=settings.model,
            fingerprint=model_fingerprint(loaded.folder, dtype, tokenizer),
            token_table_digest=loaded.token_table_digest,
            vocab_size=loaded.model.vocab_size,
            context_size=loaded.context_size,
            eos_token_ids=loaded.eos_token_ids,
            dtype=settings.dtype,
            block_size=settings.block_size,
            num_blocks=loaded.model.block_pool.num_blocks,
        )
        self.engine = TargetEngine(
            loaded.model,
            context_size=loaded.context_size,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_batch_size=settings.max_batch_size,
            tracing=self.tracing,
            max_sequences=settings.max_sequences,
            max_overcommit=settings.max_overcommit,
            check_integrity=self._check_integrity,
        )

    def collect_metrics(self) -> Iterable[Metric]:
        """Reads the engine's gauges and counts."""
        engine, stats = self.engine, self.engine.stats
        num_blocks, num_free = self._facts.num_blocks, engine.num_free_blocks
        yield gauge("num_sequences", "Sequences held.", engine.num_sequences)
        yield gauge("num_items_waiting", "Rounds that wait for a step.", engine.num_waiting)
        yield gauge("num_sessions", "Orchestrators connected.", engine.num_sessions)
        yield gauge("kv_cache_usage_ratio", "KV blocks held / all.", 1 - num_free / num_blocks)
        yield gauge("num_cached_blocks", "KV blocks in the prefix cache.", engine.num_cached_blocks)
        yield counter("steps", "Forwards of the model.", stats.num_steps)
        yield counter("step_tokens", "Rows computed.", stats.num_tokens)
        yield counter("step_seconds", "Time spent in steps, in s.", stats.step_s)
        yield counter("preemptions", "Sequences that lost their KV.", engine.num_preemptions)
        yield counter("redraw_mismatches", "Proposals cut short.", stats.num_redraw_mismatches)
        yield counter("stale_items", "Rounds dropped as stale.", stats.num_stale_items)
        yield counter("refused_sequences", "Sequences refused for load.", stats.num_refused)

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
