"""Settings of the target service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.settings import ServiceSettings


class TargetSettings(ServiceSettings):
    """Settings of the target service."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_TARGET_")

    model: str
    """Target model: a local folder of safetensors, or a hub id."""

    port: int = Field(default=50052, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one."""

    metrics_port: int | None = Field(default=9402, ge=0, le=65535)
    """TCP port of the Prometheus metrics; 0, or --port 0, picks a free one; none serves none."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type of weights and KV."""

    device: str = "cpu"
    """Torch device of the model and the KV pool: cpu, cuda, cuda:1, ..."""

    num_blocks: int = Field(default=0, ge=0)
    """KV blocks in the pool; 0 sizes the pool from free memory."""

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV block."""

    max_prefill_tokens: int = Field(default=512, ge=1)
    """Most prompt tokens computed in one step, over all sequences."""

    max_batch_size: int = Field(default=64, ge=1)
    """Most sequences verified in one step."""

    prefix_cache: bool = True
    """Whether KV of earlier requests is reused where tokens are equal from the first on."""

    max_sequences: int = Field(default=512, ge=1)
    """Most sequences held, running and waiting; more are refused with RESOURCE_EXHAUSTED."""

    max_overcommit: float = Field(default=16.0, ge=1.0)
    """Most KV the sequences held may need, in sizes of the pool; the rest is refused."""
