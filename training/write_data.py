"""Lets a target model write its own training data: prompts, and the answers to them.

    python -m training.write_data --out DIR --num-conversations 10000

The chat template is opened where a user's words begin, and the model goes on;
then it answers what it wrote. The same command again goes on with what is
there, after Ctrl-C or a kill too, and with more conversations if asked for.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from specdec.errors import ServiceError
from specdec.process import prepare_client_process
from training.settings import WriteSettings

if TYPE_CHECKING:
    from rich.progress import Progress

    from specdec.paged.loading import LoadedModel
    from training.chat_turns import ChatTurns
    from training.dataset import Dataset
    from training.prompts import PromptSet
    from training.writer import Writer

INTERRUPTED = 130
_BLOCK_SIZE = 16
# Sequences that ended leave their KV in the cache, where answers find their prompts'.
_SPARE_BLOCKS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Writes a data set.

    Args:
        argv: The command line, without the program's name; None: the process's.

    Returns:
        The exit code: 1 when something fails, 130 after Ctrl-C. What is finished
        is kept in any case.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    options.exclude = tuple(getattr(options, "exclude", ()))
    try:
        settings = WriteSettings(**vars(options))
    except ValueError as error:
        parser.error(str(error))
    prepare_client_process()
    try:
        return write(settings)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ServiceError, RuntimeError, ValueError, OSError) as error:
        print(f"training.write_data: {error}", file=sys.stderr)
        return 1


def write(settings: WriteSettings) -> int:
    """Writes a data set, or the rest of one.

    Args:
        settings: What to write.

    Returns:
        The exit code: 0 when all is there, 130 after Ctrl-C.

    Raises:
        ValueError: If the model, a file or the folder cannot be used.
        RuntimeError: If the model cannot be computed, or writes nothing of use.
    """
    # torch and transformers take seconds to import: --help need not wait.
    import torch

    from orchestrator.tokenization import Tokenization
    from specdec.models.loading import load_tokenizer, model_fingerprint, resolve_model
    from specdec.telemetry.logging import setup_logging
    from training.chat_turns import ChatTurns
    from training.dataset import Dataset
    from training.prompts import read_excluded, read_prompts
    from training.writer import Writer

    setup_logging("warning", "training")
    prompts = read_prompts(settings.prompts) if settings.prompts else None
    excluded = [read_excluded(file) for file in settings.exclude]
    folder = resolve_model(settings.model)
    turns = ChatTurns(folder)
    dtype = getattr(torch, settings.dtype)
    fingerprint = model_fingerprint(folder, dtype, load_tokenizer(folder))
    facts = {
        "model": settings.model,
        "device": settings.device,
        "batch_size": settings.batch_size,
        "num_conversations": settings.num_conversations,
        "user_opening": turns.user_opening,
    }
    with Dataset(settings.out, _identity(settings, fingerprint, excluded), facts) as dataset:
        writer = Writer(
            _load(settings, folder, turns),
            Tokenization(folder),
            turns,
            dataset,
            settings,
            prompts=prompts,
            excluded=excluded,
        )
        num_wanted = settings.num_conversations or sys.maxsize
        is_done = _run(writer, dataset, min(num_wanted, len(prompts or range(sys.maxsize))))
    _print_summary(dataset, settings.out, is_done=is_done)
    return 0 if is_done else INTERRUPTED


def _identity(
    settings: WriteSettings, fingerprint: str, excluded: list[PromptSet]
) -> dict[str, Any]:
    """What the content of a data set depends on; batch size and device round differently only."""
    from specdec.models.loading import file_digest

    names = ("seed", "temperature", "top_p", "greedy_share", "max_prompt_tokens")
    return {
        "fingerprint": fingerprint,
        "settings": {
            **{name: getattr(settings, name) for name in (*names, "max_answer_tokens", "dtype")},
            "prompts_sha256": file_digest(settings.prompts) if settings.prompts else None,
        },
        "excluded": [
            {"file": each.name, "sha256": each.sha256, "num_prompts": len(each.prompts)}
            for each in sorted(excluded, key=lambda each: each.sha256)
        ],
    }


def _load(settings: WriteSettings, folder: Path, turns: ChatTurns) -> LoadedModel:
    """Loads the model over a pool that has room for every sequence of a batch."""
    from specdec.paged.loading import load_paged_model, set_num_threads

    set_num_threads(0)
    num_tokens = (
        len(turns.user_opening_ids)
        + settings.max_prompt_tokens
        + turns.num_closing_tokens
        + settings.max_answer_tokens
    )
    blocks_each = -(-num_tokens // _BLOCK_SIZE) + 1
    return load_paged_model(
        str(folder),
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.batch_size * blocks_each + _SPARE_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_sequences=settings.batch_size,
    )


def _run(writer: Writer, dataset: Dataset, num_wanted: int) -> bool:
    """Writes until all is there or a signal comes; returns whether all is there."""
    started_s = time.monotonic()
    try:
        with _signal_flag() as is_signalled, _progress() as progress:
            task = progress.add_task("writing", total=num_wanted, rate=0.0, num_dropped=0)
            while not writer.is_done and not is_signalled():
                writer.step()
                seconds = time.monotonic() - started_s
                progress.update(
                    task,
                    completed=dataset.num_conversations,
                    rate=writer.batch.num_decoded_tokens / seconds,
                    num_dropped=dataset.num_dropped.total(),
                )
    finally:
        dataset.close(
            is_complete=writer.is_done,
            num_decoded_tokens=writer.batch.num_decoded_tokens,
            decoding_s=time.monotonic() - started_s,
        )
    return writer.is_done


@contextmanager
def _signal_flag() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C or SIGTERM has come; the second one ends the program at once.

    The exception that Python makes of Ctrl-C could strike while a line is written.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_dropped]} dropped, {task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _print_summary(dataset: Dataset, folder: Path, *, is_done: bool) -> None:
    dropped = ", ".join(f"{count} {reason.value}" for reason, count in dataset.num_dropped.items())
    print(f"{folder}: {dataset.num_conversations} conversations; dropped: {dropped or 'none'}")
    if not is_done:
        print("the same command goes on from here")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.write_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the data set")
    add("--num-conversations", type=int, metavar="N", help="what DIR is to hold in the end")
    add("--model", help="default, a local folder, or a hub id (default)")
    add("--prompts", type=Path, help="answer these: a prompt a line, or .jsonl with turns")
    add(
        "--exclude",
        type=Path,
        action="append",
        metavar="FILE",
        help="keep the turns of these JSON lines out; repeatable",
    )
    add("--max-prompt-tokens", type=int, help="longer prompts are dropped (128)")
    add("--max-answer-tokens", type=int, help="longer answers are cut (256)")
    add("--batch-size", type=int, help="sequences decoded at once (32)")
    add("--temperature", type=float, help="of prompts and sampled answers (1.0)")
    add("--top-p", type=float, help="of prompts and sampled answers (1.0)")
    add("--greedy-share", type=float, help="share of the answers that are greedy (0.5)")
    add("--seed", type=int, help="conversation i depends on the seed and i alone (0)")
    add("--device", help="torch device (cpu)")
    add("--dtype", choices=("float32", "bfloat16"), help="compute type (bfloat16)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
