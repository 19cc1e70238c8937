"""Runs the three services on this machine: what `specdec up` does.

A `Deployment` starts the target and the draft service, then the orchestrator,
waits until all are SERVING, and stops them in the other order. The target and
the orchestrator are essential: when one ends, so does the deployment. The
draft service is worth speed only and is started again when it ends.

A service says `serving: HOST:PORT` on its stdout once it serves, which is how
a port of 0 becomes known, and ends with the supervisor (`parent_watch`).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from specdec.parent_watch import PARENT_PIPE_FD
from specdec.rpc.health import wait_serving

HOST = "127.0.0.1"
"""Everything listens on loopback only."""

STARTUP_TIMEOUT_S = 600.0
"""How long a service may take to serve: a large model loads from a slow disk."""

STOP_TIMEOUT_S = 15.0
"""How long a service may take to end after SIGTERM: draining, cancelling, writing spans."""

_SERVING = "serving: "
_LAST_LINES = 8  # of a service's stderr, told when it ends: a traceback's useful part
_STABLE_S = 60.0  # a draft service that ran this long starts with the shortest backoff again
_BACKOFF_S = (0.5, 30.0)  # first and longest wait before the draft service starts again

# In a process of its own: it can be ended at any time, and the supervisor stays
# small, because making the default model needs torch.
_RESOLVE_MODEL = """
import sys
from specdec.parent_watch import exit_with_parent
exit_with_parent()
from specdec.models.loading import ModelError, resolve_model
try:
    print(resolve_model(sys.argv[1]).resolve())
except ModelError as error:
    sys.exit(str(error))
"""


class DeploymentError(Exception):
    """The deployment could not start, or lost an essential service."""


DEFAULT_PORT = 50051


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """What to run."""

    target: str = "default"
    """Target model: a local folder, a hub id, or default for the bundled one."""

    draft: str | None = None
    """Draft model, as target; None: no model."""

    drafter: Literal["ngram", "model", "none"] | None = None
    """Default drafter; None: model when there is a draft model, else ngram."""

    dtype: str = "bfloat16"
    """Compute type of both models."""

    device: str = "cpu"
    """Torch device of both models."""

    port: int = DEFAULT_PORT
    """The orchestrator's port; 0 picks free ones for all three."""

    target_port: int | None = None
    """The target service's port; None: port + 1, or 0 when that is 0."""

    draft_port: int | None = None
    """The draft service's port; None: port + 2, or 0 when that is 0."""

    num_blocks: int | None = None
    """KV blocks of the target; None: by free memory."""

    num_speculative_tokens: int | None = None
    """Most tokens drafted per round; None: the orchestrator's default."""

    prefix_cache: bool = True
    """Whether the target reuses KV of earlier requests."""

    log_level: str | None = None
    """Least severe log level of the services; None: their default."""

    trace_dir: Path | None = None
    """Folder of the spans; None: the services' default."""

    def __post_init__(self) -> None:
        """Fills in what depends on other fields.

        Raises:
            ValueError: For a drafter that contradicts the draft model.
        """
        if self.drafter == "model" and self.draft is None:
            raise ValueError("drafter: model needs a draft model")
        if self.drafter == "none" and self.draft is not None:
            raise ValueError(f"drafter: none has no use for the draft model {self.draft!r}")
        defaults = {
            "drafter": "model" if self.draft else "ngram",
            "target_port": self.port and self.port + 1,
            "draft_port": self.port and self.port + 2,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)  # frozen for everybody else


def module_command(service: str) -> list[str]:
    """The command that starts a service with this interpreter."""
    return [sys.executable, "-m", service]


def report_to_stderr(line: str) -> None:
    """Writes a progress line."""
    print(line, file=sys.stderr, flush=True)


class Deployment:
    """The three processes of one deployment, on loopback.

    async with Deployment(DeploymentOptions(port=0)) as deployment:
        client = AsyncClient(deployment.orchestrator_address)
    """

    def __init__(
        self,
        options: DeploymentOptions,
        *,
        command: Callable[[str], list[str]] = module_command,
        report: Callable[[str], None] = report_to_stderr,
    ) -> None:
        """Prepares the deployment; nothing runs yet.

        Args:
            options: What to run.
            command: Gives a service's command line, without its flags.
            report: Takes progress: the services' stderr, line by line, with their names.
        """
        self.options = options
        self._command = command
        self._report = report
        self._services: dict[str, _Service] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[DeploymentError] | None = None
        self._pipe: tuple[int, int] | None = None
        self._is_ready = False

    @property
    def orchestrator_address(self) -> str:
        """HOST:PORT of the orchestrator, once started."""
        return self._services["orchestrator"].address.result()

    async def start(self) -> None:
        """Starts the services and waits until all are SERVING.

        When one ends meanwhile, the others are stopped and DeploymentError raised.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends the services, the orchestrator first, and waits until all are gone."""
        await _cancel(self._watchers)
        if orchestrator := self._services.pop("orchestrator", None):
            await orchestrator.stop()
        await asyncio.gather(*(service.stop() for service in self._services.values()))
        self._services.clear()
        if self._pipe:
            for fd in self._pipe:
                os.close(fd)
            self._pipe = None

    async def wait_failed(self) -> None:
        """Waits until an essential service has ended, then raises DeploymentError."""
        assert self._failure is not None, "not started"
        await asyncio.wait([self._failure])
        raise self._failure.result()

    async def run_until_signalled(self) -> int:
        """Starts, says `ready: orchestrator=HOST:PORT`, and runs until SIGINT or SIGTERM.

        Returns:
            The exit code: 0 after a signal, 1 when an essential service ended.
        """
        signalled = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, signalled.set)
        run, wait = asyncio.create_task(self._run()), asyncio.create_task(signalled.wait())
        try:
            await asyncio.wait([run, wait], return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                await run
        except DeploymentError as error:
            self._report(f"error: {error}")
            return 1
        finally:
            await _cancel([run, wait])
            await self.stop()
        return 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        await self._start()
        print(f"ready: orchestrator={self.orchestrator_address}", flush=True)
        await self.wait_failed()

    async def _start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        self._pipe = os.pipe()
        start = asyncio.create_task(self._start_services())
        try:
            either: list[asyncio.Future[Any]] = [start, self._failure]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            await start
        finally:
            await _cancel([start])
        self._is_ready = True

    async def _start_services(self) -> None:
        options = self.options
        compute: dict[str, Any] = {"dtype": options.dtype, "device": options.device}

        model = await self._resolve(options.target)
        flags = compute | {"model": model, "num_blocks": options.num_blocks}
        flags |= {"port": options.target_port, "num_threads": _num_cores()}
        if not options.prefix_cache:
            flags["prefix_cache"] = False
        target = await self._spawn("target_service", flags)
        self._watch(self._fail_at_end(target))

        draft_address = None
        if options.drafter != "none":
            draft_model = await self._resolve(options.draft) if options.draft else None
            flags = compute | {"drafter": options.drafter, "model": draft_model}
            flags |= {"port": options.draft_port}
            # Prompt lookup is cheap, and its threads would only get in the target's way.
            flags |= {"num_threads": _num_cores() if draft_model else 1}
            draft = await self._spawn("draft_service", flags)
            self._watch(self._start_again_at_end(draft, flags))
            draft_address = await draft.address_at(options.draft_port)

        flags = {"model": model, "port": options.port, "num_threads": 1}
        flags |= {"target": await target.address_at(options.target_port), "draft": draft_address}
        flags |= {"num_speculative_tokens": options.num_speculative_tokens}
        orchestrator = await self._spawn("orchestrator", flags)
        self._watch(self._fail_at_end(orchestrator))

        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                for service in list(self._services.values()):
                    await wait_serving(await service.address, STARTUP_TIMEOUT_S)
        except TimeoutError as error:
            raise DeploymentError(f"not serving after {STARTUP_TIMEOUT_S:g} s") from error

    async def _resolve(self, model: str) -> str:
        """The model's folder; where that takes work, it runs in a process of its own."""
        if folder := _local_folder(model):
            return folder
        resolver = await self._execute("model", [sys.executable, "-c", _RESOLVE_MODEL, model])
        if await resolver.wait() != 0:
            raise DeploymentError(resolver.epitaph())
        del self._services["model"]
        return resolver.last_output

    async def _spawn(self, name: str, flags: dict[str, Any]) -> _Service:
        common = {"trace_dir": self.options.trace_dir, "log_level": self.options.log_level}
        flags = {"host": HOST} | common | flags
        if self.options.port != DEFAULT_PORT:
            flags["metrics_port"] = 0  # beside another deployment, maybe
        command = self._command(name)
        for flag, value in flags.items():
            option = flag.replace("_", "-")
            if value is False:
                command.append(f"--no-{option}")
            elif value is not None:
                command += [f"--{option}", str(value)]
        return await self._execute(name, command)

    async def _execute(self, name: str, command: list[str]) -> _Service:
        assert self._pipe is not None, "not started"
        parent_pipe = self._pipe[0]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=dict(os.environ) | {PARENT_PIPE_FD: str(parent_pipe)},
            pass_fds=[parent_pipe],
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
        )
        service = self._services[name] = _Service(name, process, self._report)
        return service

    def _watch(self, watcher: Coroutine[Any, Any, None]) -> None:
        self._watchers.append(asyncio.create_task(watcher))

    async def _fail_at_end(self, service: _Service) -> None:
        await service.wait()
        assert self._failure is not None, "not started"
        if not self._failure.done():  # the first to end is the cause, others follow it
            self._failure.set_result(DeploymentError(service.epitaph()))

    async def _start_again_at_end(self, draft: _Service, flags: dict[str, Any]) -> None:
        delay, longest_delay = _BACKOFF_S
        while True:
            started_at = time.monotonic()
            await draft.wait()
            if not self._is_ready:
                return await self._fail_at_end(draft)
            if time.monotonic() - started_at > _STABLE_S:
                delay = _BACKOFF_S[0]
            self._report(f"{draft.epitaph()}\nstarting draft_service again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, longest_delay)
            if draft.address.done():  # the orchestrator looks for it at its first port
                flags = flags | {"port": draft.address.result().rpartition(":")[2]}
            draft = await self._spawn("draft_service", flags)


class _Service:
    """One service's process, and what it says."""

    def __init__(self, name: str, process: Process, report: Callable[[str], None]) -> None:
        self._name = name
        self._process = process
        self._report = report
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._readers = [
            asyncio.create_task(self._read_stdout()),
            asyncio.create_task(self._read_stderr()),
        ]
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_output = ""

    async def address_at(self, port: int | None) -> str:
        """Where it will serve: known at once for a fixed port, else once it says so."""
        return f"{HOST}:{port}" if port else await self.address

    async def wait(self) -> int:
        """Waits for the end and for what was said last."""
        code = await self._process.wait()
        # Bounded, because a process it left behind may hold its end of the pipes.
        await asyncio.wait(self._readers, timeout=1.0)
        return code

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for the service and what it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self.wait()
        await _cancel(self._readers)

    def epitaph(self) -> str:
        """How it ended, with the last lines of its stderr."""
        code = self._process.returncode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return "\n".join((f"{self._name} {how}", *(f"  {line}" for line in self._last_lines)))

    async def _read_stdout(self) -> None:
        async for line in _lines(self._process.stdout):
            self.last_output = line
            if line.startswith(_SERVING) and not self.address.done():
                self.address.set_result(line.removeprefix(_SERVING).strip())

    async def _read_stderr(self) -> None:
        async for line in _lines(self._process.stderr):
            self._last_lines.append(line)
            self._report(f"{self._name}: {line}")


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Lines of any length; a progress bar's carriage returns end one too."""
    assert stream is not None, "made with a pipe"
    rest = b""
    while data := await stream.read(65536):
        *lines, rest = re.split(rb"[\r\n]+", rest + data)
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _local_folder(model: str) -> str | None:
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else None


def _num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
