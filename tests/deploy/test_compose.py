from __future__ import annotations

import asyncio
import re
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from specdec.rpc.server import GrpcServer
from tests.deploy.manifests import DEPLOY, compose, compose_settings

COMPOSE = compose()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("orchestrator", "target", "draft")


@pytest.mark.parametrize("name", OURS)
def test_settings_are_known_and_others_can_connect(name: str) -> None:
    settings = compose_settings(SERVICES[name])
    assert settings.host == "0.0.0.0"
    assert settings.drain_grace_ms / 1e3 + 10 < seconds(SERVICES[name]["stop_grace_period"])


def test_the_orchestrator_finds_all_containers_of_a_name() -> None:
    settings: Any = compose_settings(SERVICES["orchestrator"])
    for tier in ("target", "draft"):
        port = compose_settings(SERVICES[tier]).port
        assert getattr(settings, tier) == f"dns:///{tier}:{port}"


@pytest.mark.parametrize("name", OURS)
def test_containers_can_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    assert service["volumes"] == ["cache:/cache"]


def test_spans_go_to_jaeger() -> None:
    for name in OURS:
        endpoint = urlsplit(SERVICES[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
        assert (endpoint.scheme, endpoint.port) == ("http", 4317)
        assert endpoint.hostname in SERVICES


def test_only_what_people_use_is_published_and_on_loopback() -> None:
    published = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert published == {
        "orchestrator": ["127.0.0.1:50051:50051"],
        "jaeger": ["127.0.0.1:16686:16686"],
        "prometheus": ["127.0.0.1:9090:9090"],
    }


def test_images_of_others_are_pinned() -> None:
    for name in SERVICES.keys() - set(OURS):
        assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


def test_prometheus_scrapes_every_service() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    found = {tuple(sd["names"]): sd["port"] for job in jobs for sd in job["dns_sd_configs"]}
    assert found == {(name,): compose_settings(SERVICES[name]).metrics_port for name in OURS}
    assert (
        "./prometheus.yaml:/etc/prometheus/prometheus.yml:ro" in SERVICES["prometheus"]["volumes"]
    )


@pytest.mark.parametrize("name", OURS)
def test_health_checks_ask_the_services_port(name: str) -> None:
    address = SERVICES[name]["healthcheck"]["test"][-1]
    assert address == f"127.0.0.1:{compose_settings(SERVICES[name]).port}"


async def test_the_health_check_works() -> None:
    kind, python, *arguments, _ = SERVICES["target"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    server = GrpcServer(
        host="127.0.0.1", port=0, service_names=(), reflection=False, max_message_bytes=1 << 20
    )
    port = await server.start()
    server.set_serving(True)
    try:
        check = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, f"127.0.0.1:{port}"
        )
        assert await asyncio.wait_for(check.wait(), 60) == 0
    finally:
        await server.stop(0)


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))
