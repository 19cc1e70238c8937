"""`specdec trace`: looks at the traces kept on this machine."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from specdec.telemetry import names
from specdec.telemetry.span_queue import SCHEDULE_DELAY_MS
from specdec.telemetry.trace_file import default_trace_dir
from specdec.telemetry.trace_view import (
    Trace,
    TraceNotFoundError,
    list_requests,
    load_trace,
    render_waterfall,
    write_jaeger_json,
)

app = typer.Typer(help="Looks at the traces kept on this machine.", no_args_is_help=True)

TraceDir = Annotated[
    Path | None, typer.Option(help="Folder of the traces; unset picks the user's state folder.")
]
Full = Annotated[bool, typer.Option("--full", help="Show every round.")]
TraceId = Annotated[str, typer.Argument(help="A trace id, its first digits, or `last`.")]


@app.command()
def last(trace_dir: TraceDir = None, full: Full = False) -> None:
    """Shows the latest request."""
    show("last", trace_dir, full)


@app.command()
def show(trace_id: TraceId, trace_dir: TraceDir = None, full: Full = False) -> None:
    """Shows one request as a waterfall."""
    trace = _load(trace_id, trace_dir)
    console = Console()
    console.print(f"trace {trace.trace_id}", highlight=False)
    console.print(render_waterfall(trace, console.width, full=full))


@app.command(name="list")
def list_(
    trace_dir: TraceDir = None,
    limit: Annotated[int, typer.Option(min=1, help="Most requests to list.")] = 20,
) -> None:
    """Lists requests, the latest first."""
    folder = trace_dir or default_trace_dir()
    requests = list_requests(folder)
    if not requests:
        _fail(f"no traces in {folder}")
    table = Table("trace", "started", "ms", "tokens", "status", box=None, header_style="dim")
    for span in requests[:limit]:
        started = datetime.fromtimestamp(span.start_ns / 1e9).astimezone()
        attributes = span.attributes
        table.add_row(
            span.trace_id,
            started.isoformat(" ", "seconds"),
            f"{(span.end_ns - span.start_ns) / 1e6:.0f}",
            str(attributes.get(names.GEN_AI_USAGE_OUTPUT_TOKENS, "")),
            str(attributes.get(names.RPC_GRPC_STATUS_CODE, "")),
        )
    Console().print(table)


@app.command()
def export(
    trace_id: TraceId,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    trace_dir: TraceDir = None,
) -> None:
    """Writes one request as JSON for Jaeger's file upload."""
    trace = _load(trace_id, trace_dir)
    write_jaeger_json(trace, output)
    typer.echo(f"trace {trace.trace_id} written to {output}")


def _load(trace_id: str, trace_dir: Path | None) -> Trace:
    # A request that has just ended is written within this time.
    time.sleep(2 * SCHEDULE_DELAY_MS / 1_000)
    try:
        return load_trace(trace_dir or default_trace_dir(), trace_id)
    except TraceNotFoundError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
