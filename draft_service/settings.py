"""Settings of the draft service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from specdec.settings import ServiceSettings


class DraftSettings(ServiceSettings):
    """Settings of the draft service."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT_")

    drafter: Literal["ngram", "model"] = "ngram"
    """Default drafter. ngram is always offered; model when a model is given."""

    model: str | None = None
    """Draft model: a local folder of safetensors, or a hub id."""

    port: int = Field(default=50053, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one."""

    metrics_port: int | None = Field(default=9403, ge=0, le=65535)
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
    """Most sequences drafted for in one step."""

    sparse_support: int = Field(default=60, ge=1, le=4096)
    """Largest support of a SPARSE distribution, in tokens (8 bytes each)."""

    max_ngram: int = Field(default=4, ge=1, le=16)
    """Longest suffix the ngram drafter looks up, in tokens."""

    ngram_min_acceptance: float = Field(default=0.2, ge=0.0, lt=1.0)
    """Least probability of being accepted with which the ngram drafter proposes a token; 0: all."""

    @model_validator(mode="after")
    def _check_model(self) -> DraftSettings:
        if self.drafter == "model" and not self.model:
            raise ValueError("--drafter model needs --model")
        return self
