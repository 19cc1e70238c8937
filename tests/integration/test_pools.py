"""Several targets and drafters behind names: found, balanced, lost, without a failed request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from orchestrator.service import OrchestratorService
from orchestrator.settings import OrchestratorSettings
from specdec.client import AsyncClient, GenerationError
from specdec.rpc.service import Service
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.integration.checks import eventually
from tests.toy_models import save_random_llama

VOCAB_SIZE = 64
NUM_TOKENS = 40
PROMPTS = [
    [random.Random(seed).randrange(VOCAB_SIZE) for _ in range(4 + 3 * seed)] for seed in range(8)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


class Pods:
    """Services on loopback addresses 127.0.0.1, .2, ...: one port per tier, as in a cluster."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.addresses: dict[str, list[str]] = {"targets.test": [], "drafts.test": []}
        self.ports = {name: _free_port() for name in self.addresses}
        self.targets: list[TargetService] = []
        self.drafts: list[DraftService] = []
        self._common: dict[str, Any] = {
            "trace_dir": folder,
            "metrics_port": 0,
            "num_threads": 1,
            "dtype": "float32",
            "num_blocks": 256,
            "drain_grace_ms": 0,
        }

    async def add_target(self, **options: Any) -> TargetService:
        service = TargetService(
            TargetSettings(**(self._place("targets.test") | {"model": str(self.model)} | options)),
            check_integrity=True,
        )
        self.targets.append(service)
        await self._start("targets.test", service)
        return service

    async def add_draft(self) -> DraftService:
        service = DraftService(
            DraftSettings(**self._place("drafts.test"), model=str(self.model), drafter="model")
        )
        self.drafts.append(service)
        await self._start("drafts.test", service)
        return service

    def _place(self, name: str) -> dict[str, Any]:
        host = f"127.0.0.{len(self.targets if name == 'targets.test' else self.drafts) + 1}"
        return self._common | {"host": host, "port": self.ports[name]}

    async def _start(self, name: str, service: Service) -> None:
        await service.start()
        self.addresses[name].append(service.address.rpartition(":")[0])

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        if host not in self.addresses:
            raise socket.gaierror(f"unknown: {host}")
        return [(2, 1, 6, "", (address, port)) for address in self.addresses[host]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def running(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_targets: int, num_drafts: int
) -> AsyncIterator[tuple[Pods, AsyncClient, OrchestratorService]]:
    pods = Pods(model, folder)
    for _ in range(num_targets):
        await pods.add_target()
    for _ in range(num_drafts):
        await pods.add_draft()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", pods.getaddrinfo)
    settings = OrchestratorSettings(
        target=f"dns:///targets.test:{pods.ports['targets.test']}",
        draft=f"dns:///drafts.test:{pods.ports['drafts.test']}" if num_drafts else None,
        model=str(model),
        port=0,
        trace_dir=folder,
        refresh_interval_ms=100,
        draft_limits={1024: 64},
        draft_deadline_ms=30_000,
        drain_grace_ms=0,
    )
    orchestrator = OrchestratorService(settings)
    try:
        await orchestrator.start()
        async with AsyncClient(orchestrator.address) as client:
            yield pods, client, orchestrator
    finally:
        await orchestrator.stop()
        for service in (*pods.targets, *pods.drafts):
            await service.stop()


async def ids_of(client: AsyncClient, prompt: list[int], **options: Any) -> list[int]:
    stream = client.generate(
        prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **options
    )
    return list((await stream.collect()).token_ids)


class Crowd:
    """Clients that ask again and again, and check every answer."""

    def __init__(self, client: AsyncClient, expected: list[list[int]], size: int) -> None:
        self._client, self._expected = client, expected
        self.num_answers = 0
        self.is_over = False
        self.tasks = [asyncio.create_task(self._ask(i)) for i in range(size)]

    async def _ask(self, first: int) -> None:
        i = first
        while not self.is_over:
            which = i % len(PROMPTS)
            assert await ids_of(self._client, PROMPTS[which]) == self._expected[which]
            self.num_answers += 1
            i += 1

    async def more(self, count: int) -> None:
        goal = self.num_answers + count
        await eventually(
            lambda: self.num_answers >= goal or any(task.done() for task in self.tasks),
            "answers",
            timeout_s=60,
        )
        self.check()

    def check(self) -> None:
        for task in self.tasks:
            if task.done():
                task.result()

    async def finish(self) -> None:
        self.is_over = True
        await asyncio.gather(*self.tasks)


async def test_pods_come_and_go_under_load(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model, tmp_path, monkeypatch, num_targets=2, num_drafts=2) as (
        pods,
        client,
        orchestrator,
    ):
        expected = [await ids_of(client, prompt, speculation=False) for prompt in PROMPTS]
        crowd = Crowd(client, expected, size=32)
        await eventually(
            lambda: all(pod.engine.num_sequences > 3 for pod in (*pods.targets, *pods.drafts)),
            "both pods of both tiers carry load",
            timeout_s=20,
        )
        target, draft = await pods.add_target(), await pods.add_draft()
        await eventually(
            lambda: target.engine.num_sequences > 3 and draft.engine.num_sequences > 3,
            "new pods get work",
            timeout_s=20,
        )
        # A target and a drafter go, with sequences in flight there.
        await eventually(lambda: pods.targets[0].engine.num_sequences > 3, "in flight", 20)
        await pods.targets[0].stop()
        await crowd.more(40)
        # The crowd's requests are alike and end in waves: there are moments without any.
        await eventually(lambda: pods.drafts[0].engine.num_sequences > 3, "in flight", 20)
        await pods.drafts[0].stop()
        await crowd.more(40)
        await pods.drafts[1].stop()
        await draft.stop()
        await crowd.more(20)  # plainly
        await crowd.finish()
        alive = [pods.targets[1], target]
        await eventually(
            lambda: all(
                pod.engine.num_sequences == 0 and pod.engine.num_free_blocks == 256 for pod in alive
            ),
            "idle again",
            timeout_s=20,
        )
        info = await client.model_info()
        assert (info.load.num_targets, info.load.num_drafts) == (2, 0)
        await orchestrator.stop()


async def test_without_any_target_a_request_ends_with_a_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model, tmp_path, monkeypatch, num_targets=1, num_drafts=0) as (
        pods,
        client,
        _,
    ):
        await pods.targets[0].stop()
        with pytest.raises(GenerationError) as raised:
            await ids_of(client, PROMPTS[0])
        assert raised.value.reason in ("NO_TARGET", "TARGET_LOST")


async def test_a_target_with_other_weights_gets_no_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_random_llama(tmp_path / "other", seed=5)
    async with running(model, tmp_path, monkeypatch, num_targets=1, num_drafts=0) as (
        pods,
        client,
        orchestrator,
    ):
        expected = [await ids_of(client, prompt) for prompt in PROMPTS]
        stranger = await pods.add_target(model=str(other))
        pool = orchestrator._targets
        assert pool is not None
        await eventually(
            lambda: "fingerprint" in pool.refusal, "the stranger is refused", timeout_s=20
        )
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            assert await ids_of(client, prompt) == ids
        assert stranger.engine.stats.num_steps == 0


async def test_a_conversation_goes_where_its_prefix_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model, tmp_path, monkeypatch, num_targets=2, num_drafts=0) as (
        _,
        client,
        _,
    ):
        histories = [list(prompt) for prompt in PROMPTS]
        for turn in range(3):
            for history in histories:
                stream = client.generate(
                    history, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
                )
                result = await stream.collect()
                if turn:
                    cached = result.usage.cached_prompt_tokens
                    assert cached == (len(history) - 4) // 16 * 16
                history += result.token_ids
                history += [1, 2, 3]


async def test_a_busy_target_sends_requests_on_to_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model, tmp_path, monkeypatch, num_targets=2, num_drafts=0) as (
        pods,
        client,
        _,
    ):
        pods.targets[0].engine._max_sequences = 1
        results = await asyncio.gather(
            *(ids_of(client, PROMPTS[0]) for _ in range(6)), return_exceptions=True
        )
        assert len({tuple(ids) for ids in results if isinstance(ids, list)}) == 1
        assert pods.targets[0].engine.stats.num_refused > 0
        assert [r for r in results if not isinstance(r, list)] == []
