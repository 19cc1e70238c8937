"""The reader of settings tells typos, which the tests beside it rely on."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import read_settings

TARGET = ["python", "-m", "target_service", "--model=m"]


def test_flags_and_variables_are_read_as_the_process_reads_them() -> None:
    settings = read_settings([*TARGET, "--port=1"], {"SPECDEC_TARGET_METRICS_PORT": "2"})
    assert (settings.port, settings.metrics_port) == (1, 2)


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--prot=1"], {}),
        (["--metrics=1"], {}),  # the beginning of one
        (["--target=a:1"], {}),  # another service's
        ([], {"SPECDEC_TARGET_PROT": "1"}),
        ([], {"SPECDEC_DRAFT_PORT": "1"}),
    ],
)
def test_names_that_the_service_does_not_know(flags: list[str], variables: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        read_settings(TARGET + flags, variables)


def test_values_that_the_service_refuses() -> None:
    with pytest.raises(SystemExit):
        read_settings([*TARGET, "--port=many"], {})
