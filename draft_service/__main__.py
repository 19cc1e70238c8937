"""Runs the draft service: `python -m draft_service`."""

from __future__ import annotations

import sys

from draft_service.settings import DraftSettings
from specdec.process import prepare_process


def main() -> int:
    """Runs the service; returns its exit code."""
    prepare_process()
    settings = DraftSettings.from_command_line(sys.argv[1:], "draft_service")
    # torch and transformers take seconds to import: --help and a bad flag need not wait.
    from draft_service.service import DraftService
    from specdec.rpc.service import run_process

    return run_process("draft_service", lambda: DraftService(settings), settings.log_level)


if __name__ == "__main__":
    sys.exit(main())
