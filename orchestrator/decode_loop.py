"""The rounds of one sequence: propose, verify, commit or roll back, until it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from orchestrator.draft_client import DraftClient
from orchestrator.draft_length import DraftLength
from orchestrator.sequence import OutputToken, Sequence
from orchestrator.verify_batcher import VerifyBatcher
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing
from specdec.types import Proposal, VerifyResult


@dataclass(slots=True, kw_only=True)
class DecodeLoop:
    """What every sequence's rounds share."""

    verifier: VerifyBatcher
    draft_client: DraftClient | None
    """None: everything decodes plainly."""
    draft_length: DraftLength
    tracing: Tracing
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
        try:
            while sequence.finish is None:
                proposal = await self._propose(sequence, drafter)
                result = await self.verifier.verify(sequence, proposal)
                self._trace_rollback(sequence, result)
                yield result, sequence.commit(result)
        finally:
            self.num_running -= 1

    async def _propose(self, sequence: Sequence, drafter: str) -> Proposal:
        if self.draft_client is None or not drafter:
            return Proposal()
        num_tokens = self.draft_length.choose(sequence, self.num_running)
        if num_tokens == 0:
            return Proposal()
        return await self.draft_client.propose(sequence, drafter, num_tokens)

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
