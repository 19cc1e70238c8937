"""Prometheus metrics: there on every service, and equal to what the requests were told."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

import orchestrator.servicer
from specdec.client import GenerationError
from specdec.rpc.service import Service
from specdec.telemetry.logging import setup_logging
from tests.integration.checks import eventually
from tests.services import running
from tests.toy_models import save_noisy_copy, save_random_llama


def scrape(service: Service) -> dict[tuple[str, tuple[str, ...]], float]:
    """All samples, by name and label values."""
    assert service.metrics_port
    url = f"http://127.0.0.1:{service.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def _info_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    setup_logging("info", "tests")
    # A logger keeps the level it was first used with.
    monkeypatch.setattr(orchestrator.servicer, "_log", structlog.get_logger("orchestrator"))
    yield
    setup_logging("warning", "tests")


@pytest.mark.usefixtures("_info_logs")
async def test_logs_name_request_and_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_random_llama(tmp_path / "model")
    async with running(model, tmp_path / "traces") as services:
        stream = services.client.generate(
            [1, 2, 3], max_tokens=4, ignore_eos=True, request_id="the-request"
        )
        result = await stream.collect()

        def ended() -> list[dict[str, Any]]:
            messages = [record.msg for record in caplog.records]
            return [m for m in messages if isinstance(m, dict) and m["event"] == "request ended"]

        await eventually(ended, "the request's line")  # it comes after the stream's end
    (line,) = ended()
    assert line["request_id"] == "the-request"
    assert line["trace_id"] == result.trace_id
    assert (line["reason"], line["num_completion_tokens"]) == ("length", 4)


async def test_counters_add_up_to_what_requests_were_told(tmp_path: Path) -> None:
    model = save_random_llama(tmp_path / "model")
    draft = save_noisy_copy(model, tmp_path / "draft", noise=0.05)
    async with running(model, tmp_path / "traces", draft_model=draft, drafter="model") as services:
        results = []
        for i in range(6):
            stream = services.client.generate(
                [1 + i, 2, 3] * (6 + i),
                temperature=0.0 if i % 2 else 1.0,
                max_tokens=10 + i,
                ignore_eos=True,
                speculation=i != 5,
            )
            results.append(await stream.collect())
        with pytest.raises(GenerationError):
            await services.client.generate([1] * 10_000, max_tokens=3).collect()
        cut = services.client.generate([1, 2, 3], max_tokens=400, ignore_eos=True)
        async for _ in cut:
            break
        cut.cancel()

        samples = scrape(services.orchestrator)
        prefix = "specdec_spec_decode_num_"
        drafted = sum(result.speculation.num_draft_tokens for result in results)
        accepted = sum(result.speculation.num_accepted_tokens for result in results)
        assert drafted > accepted > 0
        # The cancelled request counts as well, as far as it came.
        assert samples[f"{prefix}draft_tokens_total", ()] >= drafted
        assert samples[f"{prefix}accepted_tokens_total", ()] >= accepted
        per_position = [
            value
            for (name, _), value in samples.items()
            if name == f"{prefix}accepted_tokens_per_pos_total"
        ]
        assert sum(per_position) == samples[f"{prefix}accepted_tokens_total", ()]
        assert samples["specdec_requests_total", ("length",)] == 6
        assert samples["specdec_prompt_tokens_total", ()] >= sum(
            result.usage.prompt_tokens for result in results
        )
        assert samples["specdec_generation_tokens_total", ()] >= sum(
            result.usage.completion_tokens for result in results
        )
        assert samples["specdec_time_to_first_token_seconds_count", ()] >= 6
        assert samples["specdec_inter_token_latency_seconds_count", ()] >= 6
        assert samples["specdec_num_targets", ()] == 1

        target = scrape(services.target)
        assert target["specdec_steps_total", ()] == services.target.engine.stats.num_steps > 0
        assert 0 <= target["specdec_kv_cache_usage_ratio", ()] <= 1
        assert target["specdec_num_cached_blocks", ()] > 0
        assert services.draft is not None
        drafter = scrape(services.draft)
        assert drafter["specdec_steps_total", ()] > 0
        assert drafter["specdec_num_sessions", ()] == 1
