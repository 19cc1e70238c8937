from __future__ import annotations

import re
import tomllib

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from target_service.settings import TargetSettings
from tests.deploy.manifests import DEPLOY

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
ALLOWED = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]


def test_the_build_sees_every_package_and_what_they_are_built_with() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name.rstrip("*") for name in setuptools["packages"]["find"]["include"]}
    files = {"pyproject.toml", "requirements.lock", "setup.py", "MANIFEST.in", "protos"}
    assert packages | files <= set(ALLOWED)
    assert [name for name in ALLOWED if not (ROOT / name).exists()] == []


def test_the_exposed_ports_are_the_services() -> None:
    (exposed,) = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)
    services = (OrchestratorSettings, TargetSettings, DraftSettings)
    names = ("port", "metrics_port")
    ports = [each.model_fields[name].default for name in names for each in services]
    assert exposed.split() == [str(port) for port in ports]


def test_the_image_names_its_service_nowhere_and_its_user_by_number() -> None:
    assert "ENTRYPOINT" not in DOCKERFILE
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
