"""Channels between the services, and the options both ends must agree on."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

# A client that pings more often than the server permits is cut off, and the
# server's default permits one ping in five minutes. Both ends are set here.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 20_000
# Well below the time above, so that a delayed ping is no offence.
MIN_PING_INTERVAL_MS = 10_000

Options = tuple[tuple[str, int], ...]


def channel_options(max_message_bytes: int) -> Options:
    """Options of both a channel and a server.

    Args:
        max_message_bytes: Largest message sent or received, in bytes.

    Returns:
        The options, as grpc takes them.
    """
    return (
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # A stream may be silent for minutes, and a pool idle for hours.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def open_channel(
    address: str,
    max_message_bytes: int,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """Opens a channel; it connects when first used.

    Args:
        address: HOST:PORT, or any gRPC target.
        max_message_bytes: Largest message sent or received, in bytes.
        interceptors: Outermost first.

    Returns:
        The channel, to be closed by the caller.
    """
    options = (
        *channel_options(max_message_bytes),
        # After a restart the peer is back soon: look again within a second or
        # two rather than the default's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Channels of a process to one address would share one connection.
        ("grpc.use_local_subchannel_pool", 1),
    )
    return grpc.aio.insecure_channel(address, options=options, interceptors=list(interceptors))
