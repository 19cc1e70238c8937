"""The stream to the target service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import cast

import grpc

from orchestrator.service_stream import PairingError, ServiceStream
from specdec.telemetry.tracing import Tracing
from specdec.v1 import target_pb2, target_pb2_grpc


class PoolFingerprint:
    """What all targets of a pool must agree on: the first one's fingerprint."""

    def __init__(self) -> None:
        """Takes any fingerprint first."""
        self._fingerprint: str | None = None
        self._address = ""

    def check(self, fingerprint: str, address: str) -> None:
        """Compares a target's fingerprint.

        Args:
            fingerprint: Of its weights, dtype, tokenizer and attention.
            address: Its address.

        Raises:
            PairingError: If an earlier target had another one.
        """
        if self._fingerprint is None:
            self._fingerprint, self._address = fingerprint, address
        if fingerprint != self._fingerprint:
            raise PairingError(
                f"the target at {address} has fingerprint {fingerprint[:12]}, the one at"
                f" {self._address} {self._fingerprint[:12]}: a pool serves one model alike"
            )


class TargetClient(
    ServiceStream[
        target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.GetTargetInfoResponse
    ]
):
    """Carries openings, items and releases there, and results back.

    Attributes:
        handle_result: Takes each result.
        handle_lost: Learns that the stream broke.
        num_placed: Sequences placed there by us.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int,
        tracing: Tracing,
        token_table_digest: str,
        fingerprint: PoolFingerprint,
    ) -> None:
        """Opens nothing yet.

        Args:
            address: HOST:PORT.
            max_message_bytes: Largest message, in bytes.
            tracing: Where spans go.
            token_table_digest: Of the orchestrator's own tokenizer.
            fingerprint: Shared by all targets of the pool.
        """
        super().__init__(address, max_message_bytes=max_message_bytes, tracing=tracing)
        self._token_table_digest = token_table_digest
        self._fingerprint = fingerprint
        self.num_placed = 0
        self._num_blocks_placed = 0
        """KV blocks of the sequences placed since the load was last known."""
        self.handle_result: Callable[[target_pb2.VerifyResult], None] = lambda _: None
        self.handle_lost: Callable[[TargetClient], None] = lambda _: None

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are free there, as far as we know."""
        return 0 if self.info is None else self.info.num_free_blocks - self._num_blocks_placed

    def on_info(self) -> None:
        """The load is known anew."""
        self._num_blocks_placed = 0

    def place(self, num_tokens: int) -> None:
        """Counts a sequence that is placed there.

        Args:
            num_tokens: Its length so far.
        """
        self.num_placed += 1
        block_size = self.info.block_size if self.info is not None and self.info.block_size else 1
        self._num_blocks_placed += -(-num_tokens // block_size)

    def displace(self) -> None:
        """Counts a sequence that is there no more."""
        self.num_placed -= 1

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
        self._fingerprint.check(info.fingerprint, self.address)

    def on_response(self, response: target_pb2.VerifyResponse) -> None:
        """Hands out one step's results."""
        for result in response.results:
            self.handle_result(result)

    def on_lost(self) -> None:
        """Passes the loss on."""
        self.handle_lost(self)
