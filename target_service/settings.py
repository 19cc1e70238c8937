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
