"""The `specdec` command."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from specdec.telemetry import trace_cli

# What needs grpc is imported by the commands that use it: `--help` stays quick.
if TYPE_CHECKING:
    from specdec.client import (
        Chunk,
        GenerateOptions,
        Generation,
        GenerationError,
        GenerationStream,
        Prompt,
    )

app = typer.Typer(
    help="Lossless speculative decoding: run it, call it, look into it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(trace_cli.app, name="trace")

COLOURS = {"accepted": "green", "recovered": "red", "bonus": "cyan", "target": "yellow"}
"""Colour of a token by its source."""

INTERRUPTED = 128 + 2
"""Exit code after Ctrl-C, as shells give it."""


class Drafter(StrEnum):
    """Drafters a deployment can have."""

    NGRAM = "ngram"
    MODEL = "model"
    NONE = "none"


class Dtype(StrEnum):
    """Compute types."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Acceptance(StrEnum):
    """How sampled drafts are accepted."""

    REJECTION = "rejection"
    COUPLED = "coupled"


Address = Annotated[str, typer.Option(help="The orchestrator, HOST:PORT.")]


@app.command()
def up(
    target: Annotated[
        str, typer.Option(help="Target model: a folder, a hub id, or default: a bundled one.")
    ] = "default",
    draft: Annotated[str | None, typer.Option(help="Draft model: a folder or a hub id.")] = None,
    drafter: Annotated[
        Drafter | None, typer.Option(help="Default: model with --draft, else ngram.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Compute type of weights and KV.")] = Dtype.BFLOAT16,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, cuda:1, ...")] = "cpu",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The orchestrator's port; 0: free ones for all.")
    ] = 50051,
    target_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: --port + 1.")
    ] = None,
    draft_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: --port + 2.")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=0, help="KV blocks of the target; default: by free memory.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=0, max=64, help="Most tokens drafted per round.")
    ] = None,
    trace_dir: Annotated[Path | None, typer.Option(help="Folder for recorded traces.")] = None,
) -> None:
    """Runs the three services on this machine until Ctrl-C."""
    from specdec.supervisor import Deployment, DeploymentOptions

    try:
        options = DeploymentOptions(
            target=target,
            draft=draft,
            drafter=drafter.value if drafter else None,
            dtype=dtype.value,
            device=device,
            port=port,
            target_port=target_port,
            draft_port=draft_port,
            num_blocks=num_blocks,
            num_speculative_tokens=num_speculative_tokens,
            trace_dir=trace_dir,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(asyncio.run(Deployment(options).run_until_signalled()))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.")],
    address: Address = "127.0.0.1:50051",
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Send it as a chat message; default: with --system."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past EOS.")] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode with the target alone.")
    ] = False,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Most tokens drafted per round.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="One that `specdec info` lists.")] = None,
    acceptance: Annotated[
        Acceptance | None, typer.Option(help="Default: coupled with --seed, else rejection.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Deadline, in seconds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generates text, coloured by where each token came from."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if system is not None and chat is False:
        raise typer.BadParameter("--system needs a chat: leave --no-chat out")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    options: GenerateOptions = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos or None,
        "speculation": False if no_speculation else None,
        "num_speculative_tokens": num_speculative_tokens,
        "acceptance": acceptance.value if acceptance else None,
        "drafter": drafter,
        "timeout_s": timeout,
    }
    is_chat = chat or system is not None
    _call(lambda: _generate(address, messages if is_chat else text, options, as_json))


@app.command()
def info(
    address: Address = "127.0.0.1:50051",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shows what is served, and the present load."""
    _call(lambda: _info(address, as_json))


def use_colour(stream: TextIO, *, forced: bool = False) -> bool:
    """Whether to colour what goes to a stream: NO_COLOR wins, then force, then a terminal."""
    return not os.environ.get("NO_COLOR") and (forced or stream.isatty())


def legend() -> str:
    """One line that shows each colour."""
    return "tokens: " + "  ".join(typer.style(name, fg=fg) for name, fg in COLOURS.items())


def coloured(chunk: Chunk) -> str:
    """The chunk's text, each token in its source's colour."""
    text = "".join(typer.style(t.text, fg=COLOURS.get(t.source)) for t in chunk.tokens if t.text)
    is_whole = "".join(token.text for token in chunk.tokens) == chunk.text
    return text if is_whole else chunk.text


def summary(generation: Generation) -> str:
    """One line: how many tokens, how drafting went, how fast."""
    stats = generation.speculation
    return (
        f"{len(generation.tokens)} tokens ({generation.finish_reason})"
        f" in {stats.num_rounds} rounds"
        f" | acceptance rate {stats.acceptance_rate:.2f}"
        f" | mean acceptance length {stats.mean_acceptance_length:.2f}"
        f" | {generation.tokens_per_second:.1f} tokens/s"
        f" | trace {generation.trace_id or 'none'}"
    )


def main() -> None:
    """Runs the command line."""
    app()


def _generate(address: str, prompt: Prompt, options: GenerateOptions, as_json: bool) -> None:
    from specdec.client import Client

    with Client(address) as client:  # leaving it, by Ctrl-C too, ends the call
        stream = client.generate(prompt, **options)
        if as_json:
            typer.echo(json.dumps(_as_json(stream.collect()), ensure_ascii=False))
        else:
            _show(stream)


def _show(stream: GenerationStream) -> None:
    is_coloured = use_colour(sys.stdout)
    if is_coloured:
        typer.echo(legend(), err=True)
    has_text = False
    try:
        for chunk in stream:
            # color=True: keeps the codes where use_colour has already decided.
            typer.echo(coloured(chunk) if is_coloured else chunk.text, nl=False, color=True)
            has_text = True
    finally:
        if has_text:
            typer.echo()  # whatever comes next, an error too, starts a line
    typer.echo(summary(stream.result), err=True)


def _info(address: str, as_json: bool) -> None:
    from specdec.client import Client

    with Client(address) as client:
        served = dataclasses.asdict(client.model_info(timeout_s=10))
    if as_json:
        typer.echo(json.dumps(served))
        return
    drafters, load = served.pop("drafters"), served.pop("load")
    for drafter in drafters:
        state = "available" if drafter["available"] else "not available"
        modes = ", ".join(drafter["acceptances"])
        served[f"drafter {drafter['name']}"] = f"{state} ({modes}) {drafter['model']}".rstrip()
    for name, value in (served | load).items():
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        typer.echo(f"{name.replace('_', ' ')}: {shown}")


def _as_json(generation: Generation) -> dict[str, object]:
    return {
        "request_id": generation.request_id,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish": {"reason": generation.finish_reason, "matched": generation.matched},
        "usage": dataclasses.asdict(generation.usage),
        "speculation": dataclasses.asdict(generation.speculation),
        "timing": dataclasses.asdict(generation.timing),
        "trace_id": generation.trace_id,
    }


def _call(call: Callable[[], None]) -> None:
    """Runs a call; its error becomes one line and an exit code."""
    from specdec.client import GenerationError

    try:
        call()
    except GenerationError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _fail(error: GenerationError) -> NoReturn:
    line = " ".join(f"error: {error}".split())
    if error.retry_after_ms is not None:
        line += f" (try again in {error.retry_after_ms} ms)"
    typer.echo(line, err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
