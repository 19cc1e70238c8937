"""Runs the target service: `python -m target_service --model …`."""

from __future__ import annotations

import sys

from specdec.process import prepare_process
from target_service.settings import TargetSettings


def main() -> int:
    """Runs the service; returns its exit code."""
    prepare_process()
    settings = TargetSettings.from_command_line(sys.argv[1:], "target_service")
    # torch and transformers take seconds to import: --help and a bad flag need not wait.
    from specdec.rpc.service import run_process
    from target_service.service import TargetService

    return run_process("target_service", lambda: TargetService(settings), settings.log_level)


if __name__ == "__main__":
    sys.exit(main())
