from __future__ import annotations

import json
from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind
from rich.console import Console
from typer.testing import CliRunner

from specdec.telemetry import names, trace_cli
from specdec.telemetry.trace_view import (
    Trace,
    TraceNotFoundError,
    list_requests,
    load_trace,
    render_waterfall,
    write_jaeger_json,
)
from specdec.telemetry.tracing import setup_tracing, trace_id_of


def write_request(folder: Path, num_rounds: int, start_ns: int = 1_000_000_000) -> str:
    """Writes a trace as the three services would; rounds of 10 ms. Returns its id."""
    orchestrator = setup_tracing("orchestrator", folder)
    draft, target = setup_tracing("draft", folder), setup_tracing("target", folder)
    root = orchestrator.start_span(names.GENERATE, kind=SpanKind.SERVER, start_time_ns=start_ns)
    root.set_attribute(names.RPC_GRPC_STATUS_CODE, 0)
    root.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, 42)
    for index in range(num_rounds):
        now_ns = start_ns + index * 10_000_000
        for tracing, name, remote_name, offset_ns in (
            (draft, names.DRAFT, names.PROPOSE, 0),
            (target, names.VERIFY, names.TARGET_VERIFY, 4_000_000),
        ):
            begin_ns = now_ns + offset_ns
            attributes = {names.ROUND_INDEX: index, names.NUM_DRAFT_TOKENS: 5}
            if tracing is target:
                attributes[names.NUM_ACCEPTED_TOKENS] = 2
            span = orchestrator.start_span(
                name, parent=root, attributes=attributes, start_time_ns=begin_ns
            )
            traceparent = orchestrator.traceparent_of(span)
            remote = tracing.start_span(remote_name, parent=traceparent, start_time_ns=begin_ns)
            if tracing is target:
                step = target.start_span(
                    names.TARGET_STEP,
                    links=target.links_to([remote]),
                    attributes={names.BATCH_SIZE: 2},
                    start_time_ns=begin_ns,
                )
                step.end(begin_ns + 2_000_000)
            remote.end(begin_ns + 3_000_000)
            span.end(begin_ns + 4_000_000)
    root.end(start_ns + num_rounds * 10_000_000)
    for tracing in (orchestrator, draft, target):
        assert tracing.shutdown()
    return trace_id_of(root)


def draw(trace: Trace, full: bool = False, width: int = 120) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_waterfall(trace, width, full=full))
    return console.export_text().splitlines()


def test_trace_is_put_together_from_all_services(tmp_path: Path) -> None:
    trace_id = write_request(tmp_path, num_rounds=3)
    write_request(tmp_path, num_rounds=2, start_ns=500_000_000)
    assert len(list(tmp_path.glob("*.jsonl"))) == 6
    for wanted in ("last", trace_id, trace_id[:12], trace_id.upper()):
        trace = load_trace(tmp_path, wanted)
        assert trace.trace_id == trace_id
        assert len(trace.spans) == 1 + 3 * 4
        assert len(trace.steps) == 3
    known = {span.span_id for span in trace.spans}
    roots = [span for span in trace.spans if not span.parent_id]
    assert [span.name for span in roots] == [names.GENERATE]
    assert all(span.parent_id in known for span in trace.spans if span.parent_id)
    assert {span.service for span in trace.spans} == {"orchestrator", "draft", "target"}
    assert list_requests(tmp_path)[0].trace_id == trace_id


def test_what_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFoundError, match="no traces"):
        load_trace(tmp_path / "missing", "last")
    write_request(tmp_path, num_rounds=1)
    with pytest.raises(TraceNotFoundError, match="'zz'"):
        load_trace(tmp_path, "zz")


def test_half_written_lines_are_skipped(tmp_path: Path) -> None:
    trace_id = write_request(tmp_path, num_rounds=1)
    path = next(tmp_path.glob("orchestrator-*"))
    with path.open("a") as file:
        file.write(path.read_text()[:200])
    assert load_trace(tmp_path, "last").trace_id == trace_id


def test_waterfall_shows_the_tree(tmp_path: Path) -> None:
    write_request(tmp_path, num_rounds=2)
    lines = draw(load_trace(tmp_path, "last"))
    assert [line.lstrip("↔ ").split()[0] for line in lines[1:7]] == [
        "Generate",
        names.DRAFT,
        names.PROPOSE,
        names.VERIFY,
        names.TARGET_VERIFY,
        names.TARGET_STEP,
    ]
    generate, draft, _, verify, remote, step = lines[1:7]
    assert generate.startswith("Generate")
    assert "orchestrator" in generate
    assert "20.0" in generate
    assert draft.startswith("  draft")
    assert "round 0, 2/5 accepted" in verify
    assert "round 0, 5 drafted" in draft
    assert remote.startswith("    target.verify")
    assert step.startswith("      ↔ target.step")
    assert "batch 2" in step
    assert generate.count("━") > 3 * verify.count("━") > 0
    assert all(len(line) <= 120 for line in lines)


def test_waterfall_fits_a_narrow_terminal(tmp_path: Path) -> None:
    write_request(tmp_path, num_rounds=2)
    lines = draw(load_trace(tmp_path, "last"), width=80)
    assert all(len(line) <= 80 for line in lines)
    assert any(line.rstrip().endswith("2/5 accepted") for line in lines)
    assert any("20.0" in line for line in lines)


def test_long_traces_are_shortened_unless_full(tmp_path: Path) -> None:
    write_request(tmp_path, num_rounds=30)
    trace = load_trace(tmp_path, "last")
    lines = draw(trace)
    shown = [line for line in lines if "verify" in line and "round" in line]
    rounds = [int(line.split("round ")[1].split(",")[0]) for line in shown]
    assert rounds == [0, 1, 2, 3, 27, 28, 29]
    assert sum("23 rounds left out" in line for line in lines) == 1
    assert len(draw(trace, full=True)) == 1 + 1 + 30 * 5


def test_jaeger_file_is_one_object_with_hex_ids(tmp_path: Path) -> None:
    trace_id = write_request(tmp_path, num_rounds=2)
    path = tmp_path / "trace.json"
    write_jaeger_json(load_trace(tmp_path, "last"), path)
    spans = [
        span
        for resource_spans in json.loads(path.read_text())["resourceSpans"]
        for scope_spans in resource_spans["scopeSpans"]
        for span in scope_spans["spans"]
    ]
    assert len(spans) == 1 + 2 * 5
    assert sum(span["traceId"] == trace_id for span in spans) == 1 + 2 * 4


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cli, "SCHEDULE_DELAY_MS", 0)
    monkeypatch.setenv("COLUMNS", "120")
    runner = CliRunner()
    folder = ["--trace-dir", str(tmp_path)]
    for command in (["last"], ["list"], ["show", "abc"]):
        result = runner.invoke(trace_cli.app, [*command, *folder])
        assert result.exit_code == 1
        assert "no trace" in result.stderr

    trace_id = write_request(tmp_path, num_rounds=2)
    for command in (["last"], ["show", trace_id[:8]]):
        result = runner.invoke(trace_cli.app, [*command, *folder])
        assert result.exit_code == 0
        assert trace_id in result.stdout
        assert "target.step" in result.stdout
    listed = runner.invoke(trace_cli.app, ["list", *folder])
    assert trace_id in listed.stdout
    assert "42" in listed.stdout
    output = tmp_path / "out.json"
    result = runner.invoke(trace_cli.app, ["export", "last", "--output", str(output), *folder])
    assert result.exit_code == 0
    assert output.exists()
