"""The stream to the target service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import cast

import grpc

from orchestrator.service_stream import PairingError, ServiceStream
from specdec.telemetry.tracing import Tracing
from specdec.v1 import target_pb2, target_pb2_grpc


class TargetClient(
    ServiceStream[
        target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.GetTargetInfoResponse
    ]
):
    """Carries openings, items and releases there, and results back.

    Attributes:
        handle_result: Takes each result.
        handle_lost: Learns that the stream broke.
    """

    def __init__(
        self, address: str, *, max_message_bytes: int, tracing: Tracing, token_table_digest: str
    ) -> None:
        """Opens nothing yet.

        Args:
            address: HOST:PORT.
            max_message_bytes: Largest message, in bytes.
            tracing: Where spans go.
            token_table_digest: Of the orchestrator's own tokenizer.
        """
        super().__init__(address, max_message_bytes=max_message_bytes, tracing=tracing)
        self._token_table_digest = token_table_digest
        self.handle_result: Callable[[target_pb2.VerifyResult], None] = lambda _: None
        self.handle_lost: Callable[[], None] = lambda: None

    def new_request(self) -> target_pb2.VerifyRequest:
        """An empty message."""
        return target_pb2.VerifyRequest()

    def open_stream(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[target_pb2.VerifyRequest]
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """Starts the Verify call."""
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(requests)
        return cast("AsyncIterator[target_pb2.VerifyResponse]", call)

    async def fetch_info(self) -> target_pb2.GetTargetInfoResponse:
        """Asks the target about itself."""
        stub = target_pb2_grpc.TargetServiceStub(self.channel)
        return cast(
            "target_pb2.GetTargetInfoResponse",
            await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()),
        )

    def check_pairing(self, info: target_pb2.GetTargetInfoResponse) -> None:
        """Checks that prompts are tokenised as the target expects."""
        if info.token_table_digest != self._token_table_digest:
            raise PairingError(
                f"the target at {self.address} ({info.model}) has another token table than the"
                " tokenizer given with --model"
            )

    def on_response(self, response: target_pb2.VerifyResponse) -> None:
        """Hands out one step's results."""
        for result in response.results:
            self.handle_result(result)

    def on_lost(self) -> None:
        """Passes the loss on."""
        self.handle_lost()
