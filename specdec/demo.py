"""A short demonstration: `python -m specdec.demo`, or `make demo`.

Starts the three services with the bundled model and prompt-lookup drafting,
asks for a text that repeats much of its prompt, and shows which tokens were
drafted. Then it asks the target alone for the same, to compare ids and speed.
"""

from __future__ import annotations

import asyncio
import os
import sys

from specdec.cli import coloured, legend, summary, use_colour
from specdec.client import AsyncClient, GenerateOptions, Generation, GenerationError
from specdec.supervisor import Deployment, DeploymentError, DeploymentOptions, report_to_stderr

# Most of the answer is in the prompt, which is what prompt lookup lives on.
CODE = """\
def total_price(items, tax_rate):
    subtotal = 0
    for item in items:
        subtotal = subtotal + item.price * item.quantity
    tax = subtotal * tax_rate
    return subtotal + tax
"""
PROMPT = [
    {
        "role": "user",
        "content": f"Rewrite this Python function with a docstring:\n\n```python\n{CODE}```",
    }
]
DRAFTED: GenerateOptions = {"temperature": 0, "max_tokens": 128}
PLAIN: GenerateOptions = {**DRAFTED, "speculation": False}


async def demo() -> None:
    """Runs the demonstration; nothing is left running."""
    async with (
        # The answer streams to the same terminal as the logs.
        Deployment(DeploymentOptions(port=0, drafter="ngram", log_level="warning")) as deployment,
        AsyncClient(deployment.orchestrator_address) as client,
    ):
        await _compare(client)


async def _compare(client: AsyncClient) -> None:
    is_coloured = use_colour(sys.stdout, forced=bool(os.environ.get("FORCE_COLOR")))
    # The first steps allocate and warm caches, which is nobody's decoding speed.
    for options in (DRAFTED, PLAIN):
        warm_up: GenerateOptions = {**options, "max_tokens": 8}
        await client.generate(PROMPT, **warm_up).collect()

    print(f"\n{PROMPT[0]['content']}\n")
    print(legend() if is_coloured else "answer:", end="\n\n")
    drafted = await _show(client, is_coloured)
    plain = await client.generate(PROMPT, **PLAIN).collect()

    same = "the same ids" if drafted.token_ids == plain.token_ids else "other ids (a bf16 near-tie)"
    print(
        f"\n\n{summary(drafted)}"
        f" | without speculation {plain.tokens_per_second:.1f} tokens/s, {same}"
    )
    print(
        f"see the rounds:  specdec trace show {drafted.trace_id}\n"
        f"for Jaeger's upload:  specdec trace export {drafted.trace_id} -o trace.json\n"
        "to a collector:  set OTEL_EXPORTER_OTLP_ENDPOINT"
    )


async def _show(client: AsyncClient, is_coloured: bool) -> Generation:
    stream = client.generate(PROMPT, **DRAFTED)
    async for chunk in stream:
        print(coloured(chunk) if is_coloured else chunk.text, end="", flush=True)
    return stream.result


def main() -> int:
    """Runs the demonstration.

    Returns:
        The exit code.
    """
    try:
        asyncio.run(demo())
    except (DeploymentError, GenerationError) as error:
        report_to_stderr(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
