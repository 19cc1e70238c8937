"""Settings of the orchestrator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from specdec.rpc.addresses import parse_addresses
from specdec.settings import ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """Settings of the orchestrator."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_ORCHESTRATOR_")

    target: str
    """Target services, comma-separated: HOST:PORT, or dns:///NAME:PORT for all pods of a name."""

    draft: str | None = None
    """Draft services, comma-separated, as --target; unset decodes plainly."""

    refresh_interval_ms: int = Field(default=2_000, ge=100)
    """Time between two looks at names and at the services' loads, in ms."""

    model: str
    """Where the target's tokenizer and chat template are: a local folder, or a hub id."""

    port: int = Field(default=50051, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one."""

    metrics_port: int | None = Field(default=9401, ge=0, le=65535)
    """TCP port of the Prometheus metrics; 0, or --port 0, picks a free one; none serves none."""

    num_speculative_tokens: int = Field(default=5, ge=0, le=64)
    """Most tokens drafted per round when a request sets no bound; see draft_limits."""

    draft_limits: dict[int, int] = Field(default={2: 64})
    """Most tokens drafted per round, by the most running requests it holds for; above, none."""

    draft_deadline_ms: int = Field(default=1_000, ge=1)
    """Longest wait for a proposal, in ms; past it the round goes with what has come."""

    draft_form: Literal["sparse", "dense"] = "sparse"
    """Wire form of sampled proposals' distributions."""

    max_requests: int = Field(default=256, ge=1)
    """Most requests in progress; more are refused with RESOURCE_EXHAUSTED."""

    @field_validator("target", "draft")
    @classmethod
    def _check_addresses(cls, value: str | None) -> str | None:
        if value is not None:
            parse_addresses(value)
        return value

    startup_timeout_ms: int = Field(default=600_000, ge=1)
    """How long to wait for the target to serve, in ms."""

    draft_startup_timeout_ms: int = Field(default=60_000, ge=0)
    """How long to wait for the draft service before serving without it, in ms."""
