"""Runs the orchestrator: `python -m orchestrator --target HOST:PORT …`."""

from __future__ import annotations

import sys

from orchestrator.settings import OrchestratorSettings
from specdec.process import prepare_process


def main() -> int:
    """Runs the service; returns its exit code."""
    prepare_process()
    settings = OrchestratorSettings.from_command_line(sys.argv[1:], "orchestrator")
    # torch and transformers take seconds to import: --help and a bad flag need not wait.
    from orchestrator.service import OrchestratorService
    from specdec.rpc.service import run_process

    return run_process("orchestrator", lambda: OrchestratorService(settings), settings.log_level)


if __name__ == "__main__":
    sys.exit(main())
