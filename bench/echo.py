"""A gRPC server that answers each message of a stream with fixed bytes: `python -m bench.echo 80`.

The least that a hop between two Python processes costs: no message is parsed
or made, nothing is computed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from specdec.rpc.server import server_options

METHOD = "/bench.Echo/Answer"
MAX_MESSAGE_BYTES = 1 << 20


def _handlers(num_bytes: int) -> grpc.GenericRpcHandler:
    async def answer(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        del context
        response = bytes(num_bytes)
        async for _ in requests:
            yield response

    behaviour: Any = answer
    return grpc.method_handlers_generic_handler(
        "bench.Echo", {"Answer": grpc.stream_stream_rpc_method_handler(behaviour)}
    )


async def _serve(num_bytes: int) -> None:
    server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
    server.add_generic_rpc_handlers((_handlers(num_bytes),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it closes it, or ends
    await server.stop(1.0)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
