"""Finds models, checks that they can be served exactly, and loads them.

Whatever would bend the output is refused with a reason: weights that are
missing, extra or quantised, recurrent state (it cannot roll back), positions
that change with the length of the text.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

PROVEN = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "llama",
        "mistral",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
    }
)
"""Values of `model_type` whose logits and greedy tokens the tests compare with transformers'.
Others are served too if they pass the check at start (`specdec.paged.self_check`)."""

ATTENTION_VERSION = "2"
"""Raised when our attention gives other logits than before for the same weights."""

ROPE_FIXED = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on the position alone, so that cached keys stay valid."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})

# A snapshot is what gets loaded, nothing that could run.
HUB_WEIGHTS = "*.safetensors"
HUB_FILES = [HUB_WEIGHTS, "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
HUB_IGNORED = ["*/*", "*.bin", "*.pt", "*.pth", "consolidated*"]
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

Report = Callable[[str], None]
"""Is told what goes on, a line at a time."""


class ModelError(ValueError):
    """A model cannot be found or served; the message says which and why."""


def to_stderr(line: str) -> None:
    """Reports a line to whoever started the program."""
    print(line, file=sys.stderr, flush=True)


def resolve_model(name: str, report: Report = to_stderr, *, needs_weights: bool = True) -> Path:
    """Finds the folder of a model, fetching it when needed.

    Args:
        name: "default", a local folder, or a hub id such as "Qwen/Qwen2.5-0.5B".
        report: Is told what goes on.
        needs_weights: Whether the weights are fetched too, not only tokenizer and configuration.

    Returns:
        The folder.

    Raises:
        ModelError: If the model is nowhere to be found or cannot be fetched.
    """
    if name == "default":
        # Imported here because that module imports this one.
        from specdec.models.default_model import prepare_default_model

        return prepare_default_model(report)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelError(f"model {name!r}: a file, where a folder of safetensors is needed")
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"model {name!r}: no such folder")
    report(f"fetching {name} from the hub")
    absent = f"model {name!r}: no such folder, and"
    files = HUB_FILES if needs_weights else [part for part in HUB_FILES if part != HUB_WEIGHTS]
    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=HUB_IGNORED))
    except RepositoryNotFoundError as error:
        raise ModelError(f"{absent} the hub has no such model, or not for you") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{absent} the hub could not be reached") from error
    except Exception as error:  # the hub's client lets errors of several libraries through
        raise ModelError(f"{absent} the hub did not give it: {_first_line(error)}") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a model.

    Args:
        folder: The model's folder.

    Returns:
        The tokenizer.

    Raises:
        ModelError: If there is none, or none of the `tokenizers` library.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # missing and malformed files raise all kinds
        raise ModelError(f"{folder}: no usable tokenizer: {_first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{folder}: {type(tokenizer).__name__} is not a tokenizer of the `tokenizers` library"
        )
    return tokenizer


def load_model(
    folder: Path, dtype: torch.dtype, device: str, report: Report = to_stderr
) -> PreTrainedModel:
    """Loads the weights of a model, for inference.

    Args:
        folder: The model's folder.
        dtype: Type of the weights once loaded.
        device: Torch device to put them on: cpu, cuda, cuda:1, ...
        report: Is told what goes on.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        ModelError: If the model or the device cannot be used.
    """
    _check_device(device)
    _check_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no *.safetensors weights; other formats are not loaded")
    report(f"loading {folder.name} as {str(dtype).removeprefix('torch.')} on {device}")
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # malformed files raise all kinds
        raise ModelError(f"{folder}: the weights cannot be loaded: {_first_line(error)}") from error
    model, info = loaded
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[fault]:
            first = ", ".join(map(str, sorted(info[fault])[:3]))
            kind = fault.removesuffix("_keys")
            raise ModelError(f"{folder}: {len(info[fault])} {kind} weights: {first}")
    if not model._supports_attention_backend:
        raise ModelError(f"{folder}: {type(model).__name__} takes no attention of our own")
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def eos_token_ids(
    tokenizer: PreTrainedTokenizerFast,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
) -> tuple[int, ...]:
    """Gathers the ids that end a text.

    Args:
        tokenizer: May name one.
        config: The model's; may name one or several.
        generation_config: The model's, if it has one; may name one or several.

    Returns:
        All of them that are in the vocabulary, in ascending order.
    """
    size = vocab_size(tokenizer)
    named = [tokenizer.eos_token_id]
    for source in (config, generation_config):
        ids = getattr(source, "eos_token_id", None)
        named += ids if isinstance(ids, list | tuple) else [ids]
    return tuple(sorted({i for i in named if i is not None and 0 <= i < size}))


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns one more than the highest token id; embeddings may be padded beyond it."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocab_fits(tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig) -> None:
    """Checks that the model has an embedding for every token.

    Args:
        tokenizer: The model's tokenizer.
        config: The model's configuration.

    Raises:
        ModelError: If the tokenizer has ids beyond the embeddings.
    """
    size, width = vocab_size(tokenizer), config.get_text_config().vocab_size
    if size > width:
        raise ModelError(f"the tokenizer has {size} tokens, the model only {width} embeddings")


def token_table_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns a hex SHA-256 over all (id, token) pairs, added tokens included."""
    table = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def model_fingerprint(folder: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast) -> str:
    """Tells apart models that may give different logits.

    Args:
        folder: The model's folder.
        dtype: Type the weights are loaded as.
        tokenizer: The model's tokenizer.

    Returns:
        A hex SHA-256 over configuration, weights, dtype, token table and attention.
    """
    parts = [ATTENTION_VERSION, str(dtype), token_table_digest(tokenizer)]
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        parts += [path.name, file_digest(path)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def context_size(config: PreTrainedConfig) -> int:
    """Returns the most tokens a text may have, prompt included."""
    return int(config.get_text_config().max_position_embeddings)


def _check_device(device: str) -> None:
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r}: not a torch device") from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {device!r}: not available, torch sees {torch.cuda.device_count()} CUDA devices"
        )


def _check_config(folder: Path) -> None:
    """Refuses what cannot be exact, before any weight is read."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: no config.json, so not a model's folder") from error
    except ValueError as error:
        raise ModelError(f"{folder}: config.json is not JSON: {error}") from error
    if config.get("quantization_config"):
        raise ModelError(f"{folder}: quantised weights are not served")
    if odd := set(config.get("layer_types") or ()) - ATTENTION_LAYERS:
        raise ModelError(f"{folder}: layers of type {sorted(odd)} keep state that cannot roll back")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # One for all layers, or one for each type of layer.
    ropes = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    for each in ropes:
        rope_type = each.get("rope_type", each.get("type", "default"))
        if rope_type not in ROPE_FIXED:
            detail = f"rope type {rope_type!r} changes with the length of the text"
            raise ModelError(f"{folder}: {detail}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
