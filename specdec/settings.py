"""Settings shared by the three services.

Each service has one frozen settings class. A value comes from, first match
wins: a command-line flag (`--num-blocks 64`), an environment variable
(`SPECDEC_TARGET_NUM_BLOCKS=64`), a YAML file (`--config target.yaml`), the
default. `--help` shows every setting with its meaning and unit.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

# The YAML file of the settings object being made: pydantic-settings builds its
# sources from the class alone, so the path reaches them this way.
_config_file: ContextVar[Path | None] = ContextVar("config_file", default=None)


class ServiceSettings(BaseSettings):
    """Settings every service has."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""

    port: int = Field(default=0, ge=0, le=65535)
    """TCP port to listen on; 0 picks a free one."""

    metrics_port: int | None = Field(default=0, ge=0, le=65535)
    """TCP port of the Prometheus metrics; 0, or --port 0, picks a free one; none serves none."""

    reflection: bool = True
    """Whether gRPC reflection is offered."""

    num_threads: int = Field(default=0, ge=0)
    """Compute threads of this process; 0 picks the number of cores."""

    drain_grace_ms: int = Field(default=5_000, ge=0)
    """How long running work may take to end after SIGTERM, in ms."""

    max_message_bytes: int = Field(default=32 * 1024 * 1024, ge=1024 * 1024)
    """Largest gRPC message sent or received, in bytes."""

    trace_dir: Path | None = None
    """Folder for spans when no OTLP endpoint is set; unset picks the user's state folder."""

    log_level: str = "info"
    """Least severe log level written: debug, info, warning or error."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Adds the YAML file; reads no .env file and no secrets folder."""
        del dotenv_settings, file_secret_settings
        config_file = YamlConfigSettingsSource(settings_cls, yaml_file=_config_file.get())
        return init_settings, env_settings, config_file

    @classmethod
    def from_command_line(cls, arguments: list[str], program: str) -> Self:
        """Reads flags over environment variables over the YAML file.

        Args:
            arguments: The command line, without the program's name.
            program: The program's name, for `--help`.

        Returns:
            The validated settings.

        Raises:
            SystemExit: With status 2 and a message naming setting and value
                when one is wrong, or with 0 after `--help`.
        """
        arguments, config_file = _split_config_flag(arguments)
        token = _config_file.set(config_file)
        try:
            if config_file is not None and not config_file.is_file():
                raise ValueError(f"--config: no such file: {config_file}")
            return cls(_cli_parse_args=arguments, _cli_prog_name=program)  # type: ignore[call-arg]
        except (ValueError, yaml.YAMLError) as error:
            sys.stderr.write(f"{program}: {describe(error)}\n")
            raise SystemExit(2) from None
        finally:
            _config_file.reset(token)


def describe(error: Exception) -> str:
    """Says which settings are wrong, with their values."""
    if not isinstance(error, ValidationError):
        return str(error)
    faults = []
    for fault in error.errors():
        flag = "--" + ".".join(str(part) for part in fault["loc"]).replace("_", "-")
        message = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:
            faults.append(message)
        elif fault["type"] == "missing":
            faults.append(f"{flag} is required")
        else:
            faults.append(f"{flag}: {message} (got {fault['input']!r})")
    return "; ".join(faults)


def _split_config_flag(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Takes `--config FILE` off the command line: it names a source, not a setting."""
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return arguments[:index] + arguments[index + 2 :], Path(arguments[index + 1])
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], Path(
                argument.removeprefix("--config=")
            )
    return list(arguments), None
