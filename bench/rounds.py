"""Measures the services' own time per round, against a bare echo of the same bytes.

    python -m bench.rounds

Ours: the three services as `specdec up` runs them, spans included, with the
ngram drafter and a target whose model costs nothing (`bench.zero_cost`). One
greedy stream; the time of a round is that between two messages at the client.

The echo: this process asks one grpc.aio server after the other, over streams
that stay open, for messages of the sizes that a round really has. It parses
nothing, and has no third hop to a client. Both sides take turns, on the same
kind of event loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import uvloop
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from bench import echo, zero_cost
from bench.command_line import make_parser, positive_int, write_json
from bench.samples import Spread, ratios, spread
from specdec.client import AsyncClient, GenerationError
from specdec.models.loading import ModelError, load_tokenizer, resolve_model, vocab_size
from specdec.rpc.channel import open_channel
from specdec.supervisor import Deployment, DeploymentError, DeploymentOptions, module_command
from specdec.v1 import draft_pb2, orchestrator_pb2, target_pb2

_NUM_PROMPT_TOKENS = 128
_TRACEPARENT = f"00-{1:032x}-{1:016x}-01"
_WARM_UP_ROUNDS = 100
# Far beyond what a busy machine takes: a service that hangs is to be told.
_TIMEOUT_S, _ROUND_TIMEOUT_S = 60.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Time per round, in ms."""

    ours_ms: Spread
    echo_ms: Spread
    ratio: Spread
    """Ours / echo, pair by pair."""
    num_rounds: int
    """Rounds of ours in all."""
    mean_acceptance_length: float


def round_messages() -> tuple[tuple[Message, Message], tuple[Message, Message]]:
    """A round's (request, response) to and from the drafter, and the target: full-sized."""
    common: dict[str, Any] = {"sequence_id": 300, "epoch": 1, "round_index": 200}
    common |= {"base_length": 700}
    ids = [20_000] * 5
    item = draft_pb2.ProposeItem(
        **common,
        digest=bytes(16),
        token_ids=ids[:3],
        num_speculative_tokens=5,
        remaining_ms=1_000,
        traceparent=_TRACEPARENT,
    )
    chunk = draft_pb2.DraftChunk(
        **common, token_ids=ids, final=True, status=draft_pb2.PROPOSE_STATUS_OK
    )
    verify = target_pb2.VerifyItem(
        **common, digest=bytes(16), draft_token_ids=ids, traceparent=_TRACEPARENT
    )
    result = target_pb2.VerifyResult(
        **common,
        status=target_pb2.VERIFY_STATUS_OK,
        output_token_ids=ids[:3],
        sources=[orchestrator_pb2.TOKEN_SOURCE_ACCEPTED] * 3,
        num_accepted_tokens=2,
        num_draft_tokens=5,
        queue_ms=0.1,
        step_ms=0.1,
    )
    return (
        (draft_pb2.ProposeRequest(items=[item]), draft_pb2.ProposeResponse(chunks=[chunk])),
        (
            target_pb2.VerifyRequest(items=[verify]),
            target_pb2.VerifyResponse(results=[result], step_index=200),
        ),
    )


class Echo:
    """The two echo streams, asked in turn."""

    def __init__(self, hops: Sequence[tuple[Any, bytes]]) -> None:
        """Takes (stream, request) of each hop."""
        self._hops = hops

    async def round_ms(self, num_rounds: int) -> float:
        """Runs rounds; returns the mean time of one, in ms."""
        start_s = time.perf_counter()
        for _ in range(num_rounds):
            for stream, request in self._hops:
                await stream.write(request)
                await stream.read()
        return (time.perf_counter() - start_s) * 1e3 / num_rounds


@asynccontextmanager
async def running_echo() -> AsyncIterator[Echo]:
    """Starts two echo servers of a process each and opens a stream to both."""
    async with AsyncExitStack() as stack:
        hops = []
        for request, response in round_messages():
            address = await stack.enter_async_context(_echo_server(response.ByteSize()))
            channel = open_channel(address, echo.MAX_MESSAGE_BYTES)
            stack.push_async_callback(channel.close)
            stream: Any = channel.stream_stream(echo.METHOD)()
            hops.append((stream, request.SerializeToString()))
        yield Echo(hops)


@asynccontextmanager
async def _echo_server(num_bytes: int) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        *module_command("bench.echo"),
        str(num_bytes),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


class Ours:
    """The services, asked for one long greedy generation at a time."""

    def __init__(self, client: AsyncClient, prompt: list[int]) -> None:
        """Takes a client and the prompt's ids."""
        self._client = client
        self._prompt = prompt
        self.num_rounds = 0
        self.num_tokens = 0

    async def round_ms(self, num_rounds: int) -> float:
        """Runs about that many rounds; returns the mean time of one, in ms."""
        stream = self._client.generate(
            self._prompt,
            temperature=0.0,
            ignore_eos=True,
            max_tokens=num_rounds * (zero_cost.NUM_ACCEPTED_TOKENS + 1),
            timeout_s=_TIMEOUT_S + num_rounds * _ROUND_TIMEOUT_S,
        )
        arrivals_s = [time.perf_counter() async for _ in stream]
        self.num_rounds += stream.result.speculation.num_rounds
        self.num_tokens += len(stream.result.tokens)
        return (arrivals_s[-1] - arrivals_s[0]) * 1e3 / (len(arrivals_s) - 1)


def _command(service: str) -> list[str]:
    return module_command("bench.zero_cost" if service == "target_service" else service)


@asynccontextmanager
async def running_ours(model: str) -> AsyncIterator[Ours]:
    """Starts the services with a target that computes nothing.

    Args:
        model: Whose tokenizer to use.

    Yields:
        The services, once they serve.
    """
    folder = resolve_model(model)
    size = vocab_size(load_tokenizer(folder))
    with TemporaryDirectory(prefix="specdec-bench-") as trace_dir:
        options = DeploymentOptions(
            target=str(folder), drafter="ngram", port=0, trace_dir=Path(trace_dir)
        )
        async with (
            Deployment(options, command=_command, report=lambda _: None) as deployment,
            AsyncClient(deployment.orchestrator_address) as client,
        ):
            prompt = [zero_cost.token_at(i, size) for i in range(_NUM_PROMPT_TOKENS)]
            yield Ours(client, prompt)


async def measure(model: str, num_pairs: int, num_rounds: int) -> Report:
    """Lets both sides take turns.

    Args:
        model: Whose tokenizer to use.
        num_pairs: Turns of each side.
        num_rounds: Rounds per turn.

    Returns:
        The report.
    """
    ours_ms, echo_ms = [], []
    async with running_ours(model) as ours, running_echo() as bare:
        for side in (ours, bare):
            await side.round_ms(_WARM_UP_ROUNDS)
        for _ in range(num_pairs):
            echo_ms.append(await bare.round_ms(num_rounds))
            ours_ms.append(await ours.round_ms(num_rounds))
    return Report(
        ours_ms=spread(ours_ms),
        echo_ms=spread(echo_ms),
        ratio=spread(ratios(ours_ms, echo_ms)),
        num_rounds=ours.num_rounds,
        mean_acceptance_length=ours.num_tokens / ours.num_rounds,
    )


def print_report(report: Report, console: Console) -> None:
    """Prints the table."""
    rounds = f"{report.num_rounds} rounds of {report.mean_acceptance_length:.2f} tokens"
    console.print(f"{rounds}, with a model that costs nothing", highlight=False)
    table = Table("per round", "median", "min", "max")
    for name, values, unit in (
        ("ours", report.ours_ms, " ms"),
        ("echo of the same bytes", report.echo_ms, " ms"),
        ("ours / echo", report.ratio, ""),
    ):
        cells = (f"{v:.2f}{unit}" for v in (values.median, values.low, values.high))
        table.add_row(name, *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when the model or the deployment fails.
    """
    parser = make_parser("bench.rounds", __doc__)
    parser.add_argument("--pairs", type=positive_int, default=7, help="turns of each side (7)")
    parser.add_argument("--rounds", type=positive_int, default=500, help="rounds per turn (500)")
    parser.add_argument("--model", default="default", help="whose tokenizer to use")
    options = parser.parse_args(argv)
    try:
        report = uvloop.run(measure(options.model, options.pairs, options.rounds))
    except (ModelError, DeploymentError, GenerationError, grpc.aio.AioRpcError) as error:
        print(f"bench.rounds: {error}", file=sys.stderr)
        return 1
    print_report(report, Console())
    if options.json is not None:
        write_json(options.json, asdict(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
