"""The target service with a model that costs nothing: `python -m bench.zero_cost --model …`.

Everything but the forward is the real thing: RPCs, engine thread, scheduler,
block pool, digests, rollbacks, spans. The tokenizer is that of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from specdec.models.loading import load_tokenizer, resolve_model, token_table_digest, vocab_size
from specdec.paged.block_pool import BlockPool
from specdec.process import prepare_process
from specdec.rpc.service import run_process
from specdec.types import VerifyResult
from target_service.engine import TargetEngine
from target_service.model_runner import NonFiniteLogitsError
from target_service.scheduler import Work
from target_service.service import TargetService
from target_service.servicer import TargetFacts
from target_service.settings import TargetSettings

CONTEXT_SIZE = 1 << 20
NUM_ACCEPTED_TOKENS = 2
"""Drafts accepted per round, if there are as many: with γ = 5 the rest is rolled back."""

_PERIOD = 48


def token_at(position: int, vocab_size: int) -> int:
    """The target's own token at a position: a text that repeats itself."""
    return vocab_size // 2 + position % min(_PERIOD, vocab_size // 2)


class ZeroCostRunner:
    """Decides what each work emits without computing anything."""

    def __init__(self, vocab_size: int) -> None:
        """Takes the number of token ids."""
        self._vocab_size = vocab_size

    def run(self, works: Sequence[Work]) -> list[VerifyResult | NonFiniteLogitsError | None]:
        """Accepts the first drafts and adds a token of its own; as `ModelRunner.run`."""
        return [self._decide(work) if work.is_final else None for work in works]

    def _decide(self, work: Work) -> VerifyResult:
        item = work.sequence.item
        assert item is not None
        drafts = item.proposal.token_ids
        num_accepted = min(NUM_ACCEPTED_TOKENS, len(drafts))
        position = item.base_length + num_accepted
        own = token_at(position, self._vocab_size)
        if num_accepted < len(drafts) and own == drafts[num_accepted]:
            own = token_at(position + 1, self._vocab_size)
        return VerifyResult(
            output_token_ids=(*drafts[:num_accepted], own),
            num_accepted_tokens=num_accepted,
            num_draft_tokens=len(drafts),
        )


class ZeroCostTargetService(TargetService):
    """The target service without its model."""

    def load(self) -> None:
        """Makes the engine over a pool without memory."""
        settings = self._settings
        tokenizer = load_tokenizer(resolve_model(settings.model))
        pool = BlockPool(CONTEXT_SIZE // settings.block_size, settings.block_size)
        size = vocab_size(tokenizer)
        self._facts = TargetFacts(
            model=settings.model,
            fingerprint="zero-cost",
            token_table_digest=token_table_digest(tokenizer),
            vocab_size=size,
            context_size=CONTEXT_SIZE,
            eos_token_ids=(),
            dtype=settings.dtype,
            block_size=settings.block_size,
            num_blocks=pool.num_blocks,
        )
        model: Any = SimpleNamespace(block_pool=pool)
        self.engine = TargetEngine(
            model,
            context_size=CONTEXT_SIZE,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_batch_size=settings.max_batch_size,
            tracing=self.tracing,
        )
        runner: Any = ZeroCostRunner(size)
        self.engine._runner = runner


def main() -> int:
    """Runs the service; returns its exit code."""
    prepare_process()
    settings = TargetSettings.from_command_line(sys.argv[1:], "bench.zero_cost")
    return run_process(
        "target_service", lambda: ZeroCostTargetService(settings), settings.log_level
    )


if __name__ == "__main__":
    sys.exit(main())
