"""The orchestrator, put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric

from orchestrator.decode_loop import DecodeLoop
from orchestrator.draft_client import DraftClient
from orchestrator.draft_length import DraftLength
from orchestrator.draft_pool import DraftPool
from orchestrator.metrics import RequestMetrics
from orchestrator.pool import Pool
from orchestrator.servicer import Backend, OrchestratorServicer
from orchestrator.settings import OrchestratorSettings
from orchestrator.target_client import PoolFingerprint, TargetClient
from orchestrator.target_router import TargetRouter
from orchestrator.tokenization import Tokenization
from orchestrator.verify_batcher import VerifyBatcher
from specdec.models.loading import ModelError, resolve_model
from specdec.rpc.addresses import parse_addresses
from specdec.rpc.server import GrpcServer
from specdec.rpc.service import Service, StartError
from specdec.v1 import orchestrator_pb2_grpc


class OrchestratorService(Service):
    """Pairs with targets and drafters, and serves Generate."""

    name = "orchestrator"
    service_names = ("specdec.v1.OrchestratorService",)

    def __init__(self, settings: OrchestratorSettings) -> None:
        """Starts nothing yet.

        Args:
            settings: Validated settings.
        """
        super().__init__(settings)
        self._settings = settings
        self._servicer = OrchestratorServicer()
        self._requests = RequestMetrics(self.metrics.registry)
        self._targets: Pool[TargetClient] | None = None
        self._drafts: DraftPool | None = None

    def register(self, server: GrpcServer) -> None:
        """Adds the servicer."""
        server.add(
            lambda grpc_server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
                self._servicer, grpc_server
            )
        )

    def load(self) -> None:
        """Loads the tokenizer."""
        try:
            self._tokenization = Tokenization(
                resolve_model(self._settings.model, needs_weights=False)
            )
        except ModelError as error:
            raise StartError(str(error)) from error

    def collect_metrics(self) -> Iterable[Metric]:
        """Reads what requests, rounds and pools count."""
        yield from self._requests.collect()
        yield from self._servicer.collect_metrics()

    async def begin(self) -> None:
        """Pairs with the targets, and with the drafters as far as they are there.

        Raises:
            StartError: If no target answers in time, or one of them does not fit.
        """
        settings = self._settings
        fingerprint = PoolFingerprint()

        def make_target(address: str) -> TargetClient:
            client = TargetClient(
                address,
                max_message_bytes=settings.max_message_bytes,
                tracing=self.tracing,
                token_table_digest=self._tokenization.token_table_digest,
                fingerprint=fingerprint,
            )
            verifier.adopt(client)
            return client

        self._targets = Pool(
            parse_addresses(settings.target),
            make_target,
            refresh_interval_ms=settings.refresh_interval_ms,
        )
        verifier = VerifyBatcher(self._targets, TargetRouter(), self.tracing)
        await self._pair(self._targets, settings.startup_timeout_ms, settings.target)
        target_info = next(client.info for client in self._targets.usable())
        assert target_info is not None
        if settings.draft is not None:

            def make_draft(address: str, fallbacks: Counter[str]) -> DraftClient:
                return DraftClient(
                    address,
                    max_message_bytes=settings.max_message_bytes,
                    tracing=self.tracing,
                    token_table_digest=target_info.token_table_digest,
                    vocab_size=target_info.vocab_size,
                    deadline_ms=settings.draft_deadline_ms,
                    form=settings.draft_form,
                    fallbacks=fallbacks,
                )

            self._drafts = DraftPool(
                parse_addresses(settings.draft),
                make_draft,
                refresh_interval_ms=settings.refresh_interval_ms,
            )
            # For a bounded time: a drafter is no condition, but a wrong one is a mistake.
            await self._pair(self._drafts, settings.draft_startup_timeout_ms, None)
        loop = DecodeLoop(
            verifier=verifier,
            draft_pool=self._drafts,
            draft_length=DraftLength(settings.num_speculative_tokens, settings.draft_limits),
            tracing=self.tracing,
            totals=self._requests.rounds,
        )
        self._servicer.serve(
            Backend(
                settings=settings,
                tokenization=self._tokenization,
                target_info=target_info,
                targets=self._targets,
                drafts=self._drafts,
                loop=loop,
                active_rpcs=self.active_rpcs,
                metrics=self._requests,
            )
        )

    @staticmethod
    async def _pair(pool: Pool[Any], timeout_ms: int, required: str | None) -> None:
        """Waits for a pool's first answer.

        Args:
            pool: Started here.
            timeout_ms: Longest wait, in ms.
            required: Its addresses, if the orchestrator cannot serve without it.

        Raises:
            StartError: If nothing answers that is required, or what answers does not fit.
        """
        pool.start()
        try:
            async with asyncio.timeout(timeout_ms / 1e3):
                await pool.wait_for_answer()
        except TimeoutError:
            if required is not None:
                raise StartError(pool.refusal or f"no target answers at {required}") from None
            return
        if not pool.usable():
            raise StartError(pool.refusal)

    async def drain(self) -> None:
        """Refuses new requests; running ones may go on."""
        self._servicer.drain()

    async def close(self) -> None:
        """Closes the streams to targets and drafters."""
        for pool in (self._targets, self._drafts):
            if pool is not None:
                await pool.stop()
