"""Reads what `deploy/` would run: the chart through helm, and compose.yaml."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from specdec.settings import ServiceSettings
from target_service.settings import TargetSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "specdec"

SETTINGS: dict[str, type[ServiceSettings]] = {
    "orchestrator": OrchestratorSettings,
    "target_service": TargetSettings,
    "draft_service": DraftSettings,
}
"""By the module that `python -m` runs."""

OTHER_VARIABLES = {"SPECDEC_CACHE_DIR", "SPECDEC_TRACE_DIR"}
"""Variables of ours that are no service's setting."""

Manifest = dict[str, Any]


def find_helm() -> str | None:
    """HELM of the environment, what `make helm` fetched, or the one on the path."""
    fetched = DEPLOY / ".tools" / "helm"
    return os.environ.get("HELM") or (str(fetched) if fetched.exists() else shutil.which("helm"))


def run_helm(*arguments: str, values: Manifest | None = None) -> subprocess.CompletedProcess[str]:
    """Runs helm, with values on its standard input."""
    helm = find_helm()
    assert helm, "helm is needed"
    return subprocess.run(
        [helm, *arguments, "--values=-"],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def render(values: Manifest | None = None, release: str = "blue") -> list[Manifest]:
    """The chart's manifests for some values."""
    return json.loads(_render(json.dumps(values or {}), release))


@functools.cache
def _render(values: str, release: str) -> str:
    result = run_helm("template", release, str(CHART), "--namespace=llm", values=json.loads(values))
    assert result.returncode == 0, result.stderr
    return json.dumps([each for each in yaml.safe_load_all(result.stdout) if each])


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """The manifests of one kind, by name."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def pod_spec(deployment: Manifest) -> Manifest:
    return deployment["spec"]["template"]["spec"]


def container(deployment: Manifest) -> Manifest:
    """The one container of a Deployment's pods."""
    (only,) = pod_spec(deployment)["containers"]
    return only


def chart_settings(deployment: Manifest) -> ServiceSettings:
    """What a Deployment's container makes of its flags and variables."""
    only = container(deployment)
    variables = {each["name"]: each.get("value", "") for each in only["env"]}
    return read_settings(only["command"] + only["args"], variables)


def compose() -> Manifest:
    """compose.yaml, with every variable at its default."""
    text = (DEPLOY / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def compose_settings(service: Manifest) -> ServiceSettings:
    """What a service of compose.yaml makes of its flags and variables."""
    return read_settings(shlex.split(service["command"]), service["environment"])


def read_settings(command: Sequence[str], variables: Mapping[str, str]) -> ServiceSettings:
    """Reads a service's settings as its process would, and refuses unknown names.

    Args:
        command: `python -m MODULE`, then the flags.
        variables: The environment.

    Returns:
        The settings.

    Raises:
        AssertionError: For a flag or a variable that the service does not know.
        SystemExit: For a value that it refuses.
    """
    python, option, module, *arguments = command
    assert [python, option] == ["python", "-m"]
    settings = SETTINGS[module]
    prefix = settings.model_config["env_prefix"]
    # The parser takes unambiguous beginnings of flags, and pydantic ignores variables it
    # does not know: neither would tell a typo.
    flags = {f"--{name.replace('_', '-')}" for name in settings.model_fields} | {"--config"}
    negated = {flag.replace("--", "--no-", 1) for flag in flags}
    used = {each.partition("=")[0] for each in arguments if each.startswith("--")}
    assert used <= flags | negated
    ours = {name for name in variables if name.startswith("SPECDEC_")}
    assert ours <= {prefix + name.upper() for name in settings.model_fields} | OTHER_VARIABLES
    with mock.patch.dict(os.environ, variables, clear=True):
        return settings.from_command_line(arguments, module)
