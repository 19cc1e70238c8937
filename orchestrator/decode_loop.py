"""The rounds of one sequence: propose, verify, commit or roll back, until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from orchestrator.draft_client import PendingProposal
from orchestrator.draft_length import DraftLength
from orchestrator.draft_pool import DraftPool
from orchestrator.sequence import OutputToken, Sequence, SpeculationStats
from orchestrator.verify_batcher import VerifyBatcher
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing
from specdec.types import Proposal, VerifyResult

_NO_DRAFTS = Proposal()


@dataclass(slots=True, kw_only=True)
class DecodeLoop:
    """What every sequence's rounds share."""

    verifier: VerifyBatcher
    draft_pool: DraftPool | None
    """None: everything decodes plainly."""
    draft_length: DraftLength
    tracing: Tracing
    totals: SpeculationStats
    """Statistics over all sequences."""
    num_running: int = 0
    """Sequences with a loop in progress."""

    async def run(
        self, sequence: Sequence, drafter: str
    ) -> AsyncGenerator[tuple[VerifyResult, list[OutputToken]], None]:
        """Decodes a sequence to its end.

        Args:
            sequence: To be continued.
            drafter: Name of the drafter; "" decodes plainly.

        Yields:
            Each round's result and the tokens it delivers, at least one.

        Raises:
            ServiceError: If the target cannot go on.
        """
        self.num_running += 1
        pending: PendingProposal | None = None
        try:
            pending = self._ask(sequence, drafter)
            while sequence.finish is None:
                proposal = _NO_DRAFTS if pending is None else await pending.wait()
                pending = None
                result = await self.verifier.verify(sequence, proposal)
                self._trace_rollback(sequence, result)
                tokens = sequence.commit(result, self.totals)
                if sequence.finish is None:
                    # Asked, and sent, before the client gets its tokens: the drafter
                    # works meanwhile.
                    pending = self._ask(sequence, drafter)
                    await asyncio.sleep(0)
                yield result, tokens
        finally:
            self.num_running -= 1
            if pending is not None:
                pending.abandon()

    def _ask(self, sequence: Sequence, drafter: str) -> PendingProposal | None:
        if self.draft_pool is None or not drafter:
            return None
        num_tokens = self.draft_length.choose(sequence, self.num_running)
        if num_tokens == 0:
            return None
        return self.draft_pool.ask(sequence, drafter, num_tokens)

    def _trace_rollback(self, sequence: Sequence, result: VerifyResult) -> None:
        """Shows in the trace that the target rolled drafts back."""
        num_rejected = result.num_draft_tokens - result.num_accepted_tokens
        if num_rejected:
            self.tracing.start_span(
                names.ROLLBACK,
                parent=sequence.span,
                attributes={
                    names.ROUND_INDEX: sequence.round_index,
                    names.NUM_REJECTED_TOKENS: num_rejected,
                    names.RETAINED_LENGTH: sequence.base_length + result.num_accepted_tokens + 1,
                },
            ).end()
