"""The orchestrator, put together."""

from __future__ import annotations

import asyncio

from orchestrator.decode_loop import DecodeLoop
from orchestrator.draft_client import DraftClient
from orchestrator.draft_length import DraftLength
from orchestrator.servicer import Backend, OrchestratorServicer
from orchestrator.settings import OrchestratorSettings
from orchestrator.target_client import TargetClient
from orchestrator.tokenization import Tokenization
from orchestrator.verify_batcher import VerifyBatcher
from specdec.models.loading import ModelError, resolve_model
from specdec.rpc.server import GrpcServer
from specdec.rpc.service import Service, StartError
from specdec.v1 import orchestrator_pb2_grpc


class OrchestratorService(Service):
    """Pairs with target and drafter, and serves Generate."""

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
        self._target: TargetClient | None = None
        self._draft: DraftClient | None = None

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
            self._tokenization = Tokenization(resolve_model(self._settings.model))
        except ModelError as error:
            raise StartError(str(error)) from error

    async def begin(self) -> None:
        """Pairs with the target, and with the drafter as far as it is there.

        Raises:
            StartError: If no target answers in time, or one of them does not fit.
        """
        settings = self._settings
        self._target = TargetClient(
            settings.target,
            max_message_bytes=settings.max_message_bytes,
            tracing=self.tracing,
            token_table_digest=self._tokenization.token_table_digest,
        )
        self._target.start()
        try:
            async with asyncio.timeout(settings.startup_timeout_ms / 1e3):
                await self._target.connected_once.wait()
        except TimeoutError:
            raise StartError(f"no target answers at {settings.target}") from None
        if self._target.refusal:
            raise StartError(self._target.refusal)
        assert self._target.info is not None
        if settings.draft is not None:
            self._draft = DraftClient(
                settings.draft,
                max_message_bytes=settings.max_message_bytes,
                tracing=self.tracing,
                token_table_digest=self._target.info.token_table_digest,
                vocab_size=self._target.info.vocab_size,
                deadline_ms=settings.draft_deadline_ms,
                form=settings.draft_form,
            )
            await self._pair_with_drafter(self._draft)
        loop = DecodeLoop(
            verifier=VerifyBatcher(self._target, self.tracing),
            draft_client=self._draft,
            draft_length=DraftLength(settings.num_speculative_tokens, settings.draft_limits),
            tracing=self.tracing,
        )
        self._servicer.serve(
            Backend(
                settings=settings,
                tokenization=self._tokenization,
                target=self._target,
                draft=self._draft,
                loop=loop,
                active_rpcs=self.active_rpcs,
            )
        )

    async def _pair_with_drafter(self, draft: DraftClient) -> None:
        """Waits for the drafter to come up, for a bounded time: it is no condition."""
        draft.start()
        try:
            async with asyncio.timeout(self._settings.draft_startup_timeout_ms / 1e3):
                await draft.connected_once.wait()
        except TimeoutError:
            return
        if draft.refusal:
            raise StartError(draft.refusal)

    async def drain(self) -> None:
        """Refuses new requests; running ones may go on."""
        self._servicer.drain()

    async def close(self) -> None:
        """Closes the streams to target and drafter."""
        for client in (self._target, self._draft):
            if client is not None:
                await client.stop()
