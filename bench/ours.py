"""The side to be measured: the services, through a client in this process."""

from __future__ import annotations

import time
from pathlib import Path

from bench.prompts import Prompt
from bench.samples import Sample
from specdec.client import AsyncClient
from specdec.supervisor import Deployment, DeploymentOptions

# Of one generation; far beyond what a busy machine takes: one that hangs is to be told.
_TIMEOUT_S = 600.0


def deployment(folder: Path, dtype: str) -> Deployment:
    """The three services as processes of their own, not started.

    Args:
        folder: The model's folder.
        dtype: Name of the compute type.

    Returns:
        The deployment, with the ngram drafter.
    """
    options = DeploymentOptions(
        target=str(folder),
        drafter="ngram",
        dtype=dtype,
        port=0,
        prefix_cache=False,  # a prompt comes once per turn, and is to be computed each time
    )
    return Deployment(options, report=lambda _: None)


async def generate(
    client: AsyncClient, prompt: Prompt, max_tokens: int, *, speculation: bool
) -> Sample:
    """Generates greedily, past any end of text.

    Args:
        client: Of the services.
        prompt: What to continue.
        max_tokens: Tokens to make.
        speculation: Whether with the ngram drafter, or plainly.

    Returns:
        When its tokens came.
    """
    start_s = time.perf_counter()
    stream = client.generate(
        [{"role": "user", "content": prompt.content}],
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        speculation=speculation,
        timeout_s=_TIMEOUT_S,
    )
    arrivals = []
    async for chunk in stream:
        arrivals.append((time.perf_counter(), len(chunk.tokens)))
    result = stream.result
    num_sent = len(prompt.token_ids)
    assert result.usage.prompt_tokens == num_sent, "the sides were given different prompts"
    stats = result.speculation
    return Sample(
        start_s=start_s,
        arrivals=tuple(arrivals),
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
    )
