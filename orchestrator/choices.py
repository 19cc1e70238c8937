"""The choices of one request, decoded at the same time.

The first computes the prompt; the others begin when its first round is back, and
fork the prompt's KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeAlias

from orchestrator.decode_loop import DecodeLoop
from orchestrator.generation import Choice
from orchestrator.sequence import OutputToken
from specdec.types import VerifyResult

Round: TypeAlias = tuple[Choice, VerifyResult, list[OutputToken]]


async def run_choices(
    loop: DecodeLoop, choices: list[Choice], drafter: str
) -> AsyncGenerator[Round, None]:
    """Decodes all choices to their ends.

    Args:
        loop: Runs each one's rounds.
        choices: At least one, by index.
        drafter: Name of the drafter; "" decodes plainly.

    Yields:
        Each round of each choice, as they come; a choice is never more than two
        rounds ahead of what was taken.

    Raises:
        ServiceError: If one of them cannot go on; the others end with it.
    """
    if len(choices) == 1:
        async with aclosing(loop.run(choices[0].sequence, drafter)) as rounds:
            async for result, tokens in rounds:
                yield choices[0], result, tokens
        return
    outbox: asyncio.Queue[Round | Exception | None] = asyncio.Queue(maxsize=1)
    prompt_is_computed = asyncio.Event()

    async def decode(choice: Choice) -> None:
        try:
            if choice.index > 0:
                await prompt_is_computed.wait()
            async with aclosing(loop.run(choice.sequence, drafter)) as rounds:
                async for result, tokens in rounds:
                    prompt_is_computed.set()
                    await outbox.put((choice, result, tokens))
        except Exception as error:
            await outbox.put(error)
        else:
            await outbox.put(None)

    tasks = [asyncio.create_task(decode(choice)) for choice in choices]
    try:
        num_running = len(choices)
        while num_running:
            item = await outbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
