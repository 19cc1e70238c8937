"""The supervisor with services that load nothing and only serve health."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from specdec import supervisor
from specdec.rpc.health import wait_serving
from specdec.supervisor import Deployment, DeploymentError, DeploymentOptions

ROOT = Path(__file__).parents[2]

# Called as NAME BEHAVIOUR FOLDER --flags; leaves its flags in FOLDER/NAME.PID.
SERVICE = """
import json, os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from specdec.parent_watch import exit_with_parent

exit_with_parent()
name, behaviour, folder, *flags = sys.argv[1:]
flags = dict(zip(flags[::2], flags[1::2]))

def stop(*_):
    with open(f"{folder}/ended", "a") as ended:
        ended.write(name + "\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else stop)
with open(f"{folder}/.{name}", "w") as file:
    json.dump(flags, file)
os.rename(f"{folder}/.{name}", f"{folder}/{name}.{os.getpid()}")
print("loading", file=sys.stderr, flush=True)
if behaviour == "die":
    sys.exit("no such model")
if behaviour != "hang":
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:" + flags["--port"])
    server.start()
    print(f"serving: 127.0.0.1:{port}", flush=True)
time.sleep(60)
"""

UP = """
import asyncio, json, sys
from specdec.supervisor import Deployment, DeploymentOptions
script, folder, model, behaviours = sys.argv[1:]
behaviours = json.loads(behaviours)
def command(name):
    return [sys.executable, script, name, behaviours.get(name, "serve"), folder]
deployment = Deployment(DeploymentOptions(target=model, port=0), command=command)
sys.exit(asyncio.run(deployment.run_until_signalled()))
"""


class Services:
    """Starts fake services, and knows which run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "services"
        self.script = folder / "service.py"
        self.model = folder / "model"
        self.folder.mkdir()
        self.model.mkdir()
        self.script.write_text(SERVICE)
        self.behaviours: dict[str, str] = {}
        self.reports: list[str] = []

    def deployment(self, **options: Any) -> Deployment:
        options = {"target": str(self.model), "port": 0} | options
        return Deployment(
            DeploymentOptions(**options), command=self._command, report=self.reports.append
        )

    def up(self) -> subprocess.Popen[str]:
        arguments = [self.script, self.folder, self.model, json.dumps(self.behaviours)]
        return subprocess.Popen(
            [sys.executable, "-c", UP, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def started(self, name: str) -> list[Path]:
        return list(self.folder.glob(f"{name}.*"))

    def flags(self, name: str) -> dict[str, str]:
        (file,) = self.started(name)
        flags: dict[str, str] = json.loads(file.read_text())
        return flags

    def running(self, name: str = "*") -> list[int]:
        pids = (int(file.suffix[1:]) for file in self.started(name))
        return [pid for pid in pids if _is_running(pid)]

    def ended(self) -> list[str]:
        return (self.folder / "ended").read_text().split()

    def _command(self, name: str) -> list[str]:
        behaviour = self.behaviours.get(name, "serve")
        return [sys.executable, str(self.script), name, behaviour, str(self.folder)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    services = Services(tmp_path)
    yield services
    for pid in services.running():
        os.kill(pid, signal.SIGKILL)


def read_ready(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    assert line.startswith("ready: orchestrator=127.0.0.1:")
    return line.strip().partition("=")[2]


def wait_until(is_true: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


async def test_starts_three_services_that_know_each_other(services: Services) -> None:
    async with services.deployment(num_speculative_tokens=3, num_blocks=64) as deployment:
        await wait_serving(deployment.orchestrator_address, 1)
        assert len(services.running()) == 3
        target, draft = services.flags("target_service"), services.flags("draft_service")
        orchestrator = services.flags("orchestrator")
        await wait_serving(orchestrator["--target"], 1)
        await wait_serving(orchestrator["--draft"], 1)
    assert services.running() == []
    assert services.ended()[0] == "orchestrator"
    assert target["--model"] == orchestrator["--model"] == str(services.model)
    assert target["--num-blocks"] == "64"
    assert orchestrator["--num-speculative-tokens"] == "3"
    assert draft["--drafter"] == "ngram"
    assert "--model" not in draft
    assert draft["--num-threads"] == "1"
    assert "target_service: loading" in services.reports


async def test_drafter_none_leaves_the_draft_service_out(services: Services) -> None:
    async with services.deployment(drafter="none"):
        assert services.started("draft_service") == []
        assert "--draft" not in services.flags("orchestrator")


def test_options_fill_in_ports_and_drafter() -> None:
    options = DeploymentOptions()
    assert (options.target_port, options.draft_port) == (50052, 50053)
    assert options.drafter == "ngram"
    options = DeploymentOptions(port=0, draft="d", draft_port=7)
    assert (options.target_port, options.draft_port) == (0, 7)
    assert options.drafter == "model"


async def test_a_model_that_is_not_there_is_told(services: Services) -> None:
    with pytest.raises(DeploymentError, match=r"model '\./absent'"):
        await services.deployment(target="./absent").start()
    assert services.started("*") == []


@pytest.mark.parametrize("name", ["target_service", "draft_service", "orchestrator"])
async def test_an_end_during_start_ends_all_at_once(services: Services, name: str) -> None:
    services.behaviours = {"target_service": "hang", name: "die"}
    # A fixed port, for the orchestrator not to wait until the target tells its own.
    deployment = services.deployment(target_port=9)
    async with asyncio.timeout(10):
        assert await deployment.run_until_signalled() == 1
    assert services.reports[-1] == f"error: {name} ended with 1\n  loading\n  no such model"
    assert services.running() == []


@pytest.mark.parametrize("name", ["target_service", "orchestrator"])
async def test_an_essential_service_takes_all_with_it(services: Services, name: str) -> None:
    deployment = services.deployment()
    await deployment.start()
    os.kill(services.running(name)[0], signal.SIGKILL)
    with pytest.raises(DeploymentError, match=f"{name} was ended by SIGKILL"):
        await deployment.wait_failed()
    await deployment.stop()
    assert services.running() == []


async def test_a_draft_service_is_started_again(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05, 0.1))
    async with services.deployment() as deployment:
        address = services.flags("orchestrator")["--draft"]
        for num_starts in (2, 3):
            os.kill(services.running("draft_service")[0], signal.SIGKILL)
            await asyncio.to_thread(
                wait_until, lambda n=num_starts: len(services.started("draft_service")) == n
            )
            await wait_serving(address, 10)
        assert len(services.running("orchestrator")) == len(services.running("target_service")) == 1
        await wait_serving(deployment.orchestrator_address, 1)
    assert services.running() == []


async def test_a_service_that_ignores_sigterm_is_killed(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.2)
    services.behaviours = {"target_service": "stubborn"}
    async with services.deployment(drafter="none"):
        assert len(services.running()) == 2
    assert services.running() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_and_is_a_success(services: Services, number: int) -> None:
    with services.up() as up:
        read_ready(up.stdout)
        assert len(services.running()) == 3
        up.send_signal(number)
        assert up.wait(10) == 0
        assert services.running() == []
        assert services.ended()[0] == "orchestrator"


def test_a_signal_during_start_stops_all(services: Services) -> None:
    services.behaviours = {"target_service": "hang"}
    with services.up() as up:
        wait_until(lambda: len(services.running()) == 2)
        up.send_signal(signal.SIGTERM)
        assert up.wait(10) == 0
        assert services.running() == []


def test_a_killed_supervisor_leaves_nothing(services: Services) -> None:
    with services.up() as up:
        read_ready(up.stdout)
        assert len(services.running()) == 3
        up.kill()
        wait_until(lambda: services.running() == [])
