"""Settings of the orchestrator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.settings import ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """Settings of the orchestrator."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_ORCHESTRATOR_")

    target: str
    """Address of the target service, HOST:PORT."""

    draft: str | None = None
    """Address of the draft service, HOST:PORT; unset decodes plainly."""

    model: str
    """Where the target's tokenizer and chat template are: a local folder, or a hub id."""

    port: int = Field(default=50051, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one."""

    num_speculative_tokens: int = Field(default=5, ge=0, le=64)
    """Most tokens drafted per round when a request sets no bound; see draft_limits."""

    draft_limits: dict[int, int] = Field(default={2: 64, 4: 3, 8: 1})
    """Most tokens drafted per round, by the most running requests it holds for; above, none."""

    draft_deadline_ms: int = Field(default=1_000, ge=1)
    """Longest wait for a proposal, in ms; past it the round goes with what has come."""

    draft_form: Literal["sparse", "dense"] = "sparse"
    """Wire form of sampled proposals' distributions."""

    max_requests: int = Field(default=256, ge=1)
    """Most requests in progress; more are refused with RESOURCE_EXHAUSTED."""

    startup_timeout_ms: int = Field(default=600_000, ge=1)
    """How long to wait for the target to serve, in ms."""

    draft_startup_timeout_ms: int = Field(default=60_000, ge=0)
    """How long to wait for the draft service before serving without it, in ms."""
