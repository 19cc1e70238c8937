from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text().splitlines()


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize("proto", sorted(p.stem for p in ROOT.glob("protos/specdec/v1/*.proto")))
def test_stubs_import(proto: str) -> None:
    assert import_module(f"specdec.v1.{proto}_pb2").DESCRIPTOR.package == "specdec.v1"
    import_module(f"specdec.v1.{proto}_pb2_grpc")


def test_the_lock_holds_exact_public_versions_only() -> None:
    assert [line for line in LOCK if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []


def test_the_lock_holds_every_dependency() -> None:
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    assert {name_of(each) for each in wanted} - {name_of(line) for line in LOCK} == set()
