"""The three services in this process, on free ports, for tests.

Real servers, real streams, real engines: only the process boundary is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from orchestrator.service import OrchestratorService
from orchestrator.settings import OrchestratorSettings
from specdec.client import AsyncClient
from target_service.service import TargetService
from target_service.settings import TargetSettings


@dataclass(slots=True)
class Services:
    """A running deployment."""

    target: TargetService
    draft: DraftService | None
    orchestrator: OrchestratorService
    client: AsyncClient


@contextlib.asynccontextmanager
async def running(
    target_model: Path,
    trace_dir: Path,
    *,
    draft_model: Path | None = None,
    drafter: str = "ngram",
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    orchestrator: dict[str, Any] | None = None,
) -> AsyncIterator[Services]:
    """Runs the services and a client.

    Args:
        target_model: Folder of the target.
        trace_dir: Where spans go.
        draft_model: Folder of the draft model, if any.
        drafter: Default drafter: ngram, model, or none for no draft service.
        target: More settings of the target service; float32 and the pool's
            integrity checked after every step unless said otherwise.
        draft: More settings of the draft service.
        orchestrator: More settings of the orchestrator.

    Yields:
        The deployment, once it serves.
    """
    common: dict[str, Any] = {
        "port": 0,
        "trace_dir": trace_dir,
        "drain_grace_ms": 1_000,
        "num_threads": 1,
    }
    async with contextlib.AsyncExitStack() as stack:
        target_service = TargetService(
            TargetSettings(
                **(
                    common
                    | {"model": str(target_model), "dtype": "float32", "num_blocks": 512}
                    | (target or {})
                )
            ),
            check_integrity=True,
        )
        await stack.enter_async_context(target_service)
        draft_service = None
        if drafter != "none":
            draft_service = DraftService(
                DraftSettings(
                    **(
                        common
                        | {"drafter": drafter, "dtype": "float32", "num_blocks": 512}
                        | ({"model": str(draft_model)} if draft_model else {})
                        | (draft or {})
                    )
                )
            )
            await stack.enter_async_context(draft_service)
        orchestrator_service = OrchestratorService(
            OrchestratorSettings(
                **(
                    common
                    | {
                        "target": target_service.address,
                        "draft": draft_service.address if draft_service else None,
                        "model": str(target_model),
                        # Tests want the draft length they ask for, whatever the load or speed.
                        "draft_limits": {1024: 64},
                        "draft_deadline_ms": 30_000,
                    }
                    | (orchestrator or {})
                )
            )
        )
        await stack.enter_async_context(orchestrator_service)
        client = await stack.enter_async_context(AsyncClient(orchestrator_service.address))
        yield Services(target_service, draft_service, orchestrator_service, client)
