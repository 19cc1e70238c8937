"""The stream to the draft service: proposals, as hints with a deadline.

A drafter that is gone, late, or talks nonsense costs speed only: its round
runs plain, and drafting resumes when it answers again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import grpc
import structlog
from opentelemetry.trace import Span

from orchestrator.sequence import Sequence
from orchestrator.service_stream import PairingError, ServiceStream
from specdec.errors import InvalidArgumentError
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing
from specdec.types import Acceptance, DraftDistribution, Proposal
from specdec.v1 import draft_pb2, draft_pb2_grpc, tensor_pb2
from specdec.wire import (
    ACCEPTANCES_TO_PROTO,
    bad_words_to_proto,
    check_token_ids,
    distribution_from_proto,
    sampling_to_proto,
)

_log = structlog.get_logger(__name__)

_REOPEN = frozenset(
    {
        draft_pb2.PROPOSE_STATUS_UNKNOWN_SEQUENCE,
        draft_pb2.PROPOSE_STATUS_MISMATCH,
        draft_pb2.PROPOSE_STATUS_STALE,
    }
)


@dataclass(slots=True)
class _Placement:
    """How the drafter knows a sequence, and what it is being asked."""

    epoch: int = 0
    is_open: bool = False
    num_synced_tokens: int = 0
    """Committed tokens the drafter was told."""
    outstanding: tuple[int, int] | None = None
    """(epoch, round) of the proposal that is not final yet."""
    token_ids: list[int] = field(default_factory=list)
    draft_probs: list[DraftDistribution] = field(default_factory=list)
    is_final: asyncio.Event = field(default_factory=asyncio.Event)
    takes_probs: bool = True
    """Whether distributions are read: coupled and greedy proposals have none."""
    is_refused: bool = False
    """Whether the drafter will not serve this sequence."""


@dataclass(slots=True)
class PendingProposal:
    """The proposal of one round, on its way; to be waited for once, or abandoned."""

    _placement: _Placement
    _deadline_s: float
    _span: Span
    _fallbacks: Counter[str]

    async def wait(self) -> Proposal:
        """Waits for the proposal; never fails.

        Returns:
            What has come by the deadline; possibly nothing.
        """
        placement = self._placement
        try:
            if not placement.is_final.is_set():
                loop = asyncio.get_running_loop()
                remaining_s = self._deadline_s - time.monotonic()
                deadline = loop.call_later(max(0.0, remaining_s), placement.is_final.set)
                try:
                    await placement.is_final.wait()
                finally:
                    deadline.cancel()
            if placement.outstanding is not None:
                self._fallbacks["late"] += 1
                self._span.set_attribute(names.FALLBACK_REASON, "late")
            proposal = Proposal(tuple(placement.token_ids), tuple(placement.draft_probs))
            self._span.set_attribute(names.NUM_DRAFT_TOKENS, len(proposal.token_ids))
            return proposal
        finally:
            self._span.end()

    def abandon(self) -> None:
        """Does without the proposal: the sequence is about to be released."""
        self._span.end()


class DraftClient(
    ServiceStream[
        draft_pb2.ProposeRequest, draft_pb2.ProposeResponse, draft_pb2.GetDraftInfoResponse
    ]
):
    """Gets proposals from one draft service."""

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int,
        tracing: Tracing,
        token_table_digest: str,
        vocab_size: int,
        deadline_ms: int,
        form: str,
        fallbacks: Counter[str],
    ) -> None:
        """Opens nothing yet.

        Args:
            address: HOST:PORT.
            max_message_bytes: Largest message, in bytes.
            tracing: Where spans go.
            token_table_digest: Of the target; a draft model's must be equal.
            vocab_size: Number of token ids of the target.
            deadline_ms: Longest wait for a proposal, in ms.
            form: Wire form of sampled proposals, sparse or dense.
            fallbacks: Counts rounds that run plain although drafts were wanted, by reason.
        """
        super().__init__(address, max_message_bytes=max_message_bytes, tracing=tracing)
        self._token_table_digest = token_table_digest
        self._vocab_size = vocab_size
        self._deadline_s = deadline_ms / 1e3
        self._form = {
            "sparse": tensor_pb2.DISTRIBUTION_FORM_SPARSE,
            "dense": tensor_pb2.DISTRIBUTION_FORM_DENSE,
        }[form]
        self._placements: dict[int, _Placement] = {}
        self._fallbacks = fallbacks

    # Asking.

    def ask(self, sequence: Sequence, drafter: str, num_tokens: int) -> PendingProposal | None:
        """Asks for the proposal of one round; never fails.

        The first round opens the sequence and runs plain, while the drafter
        computes the prompt.

        Args:
            sequence: Whose round it is.
            drafter: The drafter's name.
            num_tokens: Most tokens wanted, at least 1.

        Returns:
            What to wait for, or to abandon; None when the round runs plain.
        """
        placement = self._placements.setdefault(sequence.sequence_id, _Placement())
        reason = self._why_not(placement)
        if reason:
            self._fallbacks[reason] += 1
            return None
        is_first = not placement.is_open
        span = self._tracing.start_span(
            names.DRAFT,
            parent=sequence.span,
            attributes={
                names.DRAFTER: drafter,
                names.ROUND_INDEX: sequence.round_index,
                names.BASE_LENGTH: sequence.base_length,
                names.NUM_SPECULATIVE_TOKENS: 0 if is_first else num_tokens,
            },
        )
        if is_first:
            self._open(placement, sequence, drafter)
            span.end()
            return None
        deadline_s = time.monotonic() + self._timeout_s(sequence)
        self._ask(placement, sequence, num_tokens, self._tracing.traceparent_of(span))
        return PendingProposal(placement, deadline_s, span, self._fallbacks)

    @property
    def num_placed(self) -> int:
        """Sequences placed there by us."""
        return len(self._placements)

    def offers(self, drafter: str) -> bool:
        """Whether it has a drafter of that name."""
        return self.info is not None and drafter in self.info.drafters

    def _why_not(self, placement: _Placement) -> str:
        """Why nothing can be asked now; "" when it can."""
        if placement.is_refused:
            return "refused"
        if placement.outstanding is not None:
            return "late"  # the last proposal is still being made
        return ""

    def _open(self, placement: _Placement, sequence: Sequence, drafter: str) -> None:
        placement.is_open = True
        placement.epoch += 1
        placement.num_synced_tokens = sequence.base_length
        acceptance = sequence.speculation.acceptance
        keys = sequence.keys
        # A seeded output must not depend on what a drafter sends along.
        placement.takes_probs = acceptance is Acceptance.REJECTION and not sequence.params.is_greedy
        message = draft_pb2.OpenDraft(
            sequence_id=sequence.sequence_id,
            epoch=placement.epoch,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            drafter=drafter,
            sampling=sampling_to_proto(sequence.params),
            acceptance=ACCEPTANCES_TO_PROTO[acceptance],
            key=keys.target if acceptance is Acceptance.COUPLED else keys.propose,
            form=self._form,
            stop_token_ids=sorted(sequence.output.stop_token_ids),
            end_token_ids=sequence.params.end_token_ids,
            bad_word_token_ids=bad_words_to_proto(sequence.params),
        )
        if message.ByteSize() > self.max_part_bytes:
            placement.is_refused = True  # it decodes plainly
        else:
            self.send(opens=[message])

    def _ask(
        self, placement: _Placement, sequence: Sequence, num_tokens: int, traceparent: str
    ) -> None:
        placement.outstanding = (placement.epoch, sequence.round_index)
        placement.token_ids, placement.draft_probs = [], []
        placement.is_final.clear()
        item = draft_pb2.ProposeItem(
            sequence_id=sequence.sequence_id,
            epoch=placement.epoch,
            round_index=sequence.round_index,
            base_length=sequence.base_length,
            digest=sequence.base_digest(),
            token_ids=sequence.token_ids[placement.num_synced_tokens :],
            num_speculative_tokens=num_tokens,
            remaining_ms=int(self._timeout_s(sequence) * 1e3),
            traceparent=traceparent,
        )
        placement.num_synced_tokens = sequence.base_length
        self.send(items=[item])

    def _timeout_s(self, sequence: Sequence) -> float:
        if sequence.deadline_s is None:
            return self._deadline_s
        return max(0.0, min(self._deadline_s, sequence.deadline_s - time.monotonic()))

    def release(self, sequence: Sequence) -> None:
        """Lets a sequence go at the drafter."""
        placement = self._placements.pop(sequence.sequence_id, None)
        if placement is not None and placement.epoch:
            message = draft_pb2.ReleaseDraft(
                sequence_id=sequence.sequence_id,
                epoch=placement.epoch,
                retained_length=sequence.base_length,
            )
            self.send(releases=[message])

    # Answers.

    def on_response(self, response: draft_pb2.ProposeResponse) -> None:
        """Adds tokens to the proposals they belong to."""
        for chunk in response.chunks:
            placement = self._placements.get(chunk.sequence_id)
            if placement is not None and placement.outstanding == (chunk.epoch, chunk.round_index):
                self._add(placement, chunk)

    def _add(self, placement: _Placement, chunk: draft_pb2.DraftChunk) -> None:
        if chunk.status in _REOPEN:
            placement.is_open = False
        elif chunk.status == draft_pb2.PROPOSE_STATUS_INVALID:
            placement.is_refused = True
            _log.warning("drafter refuses", address=self.address, detail=chunk.detail)
        try:
            self._check_chunk(placement, chunk)
            placement.token_ids += chunk.token_ids
            if placement.takes_probs:
                placement.draft_probs += [
                    distribution_from_proto(q, self._vocab_size) for q in chunk.distributions
                ]
        except InvalidArgumentError as error:
            # Nonsense: the whole proposal is dropped, whatever was drawn.
            placement.token_ids, placement.draft_probs = [], []
            placement.is_open = False
            placement.outstanding = None
            placement.is_final.set()
            self._fallbacks["malformed"] += 1
            _log.warning("malformed draft", address=self.address, detail=error.message)
            return
        if chunk.final:
            placement.outstanding = None
            placement.is_final.set()

    def _check_chunk(self, placement: _Placement, chunk: draft_pb2.DraftChunk) -> None:
        if chunk.start_index != len(placement.token_ids):
            detail = f"must be {len(placement.token_ids)} (got {chunk.start_index})"
            raise InvalidArgumentError("start_index", detail)
        if chunk.parent_indices:
            raise InvalidArgumentError("parent_indices", "trees are not supported yet")
        check_token_ids("token_ids", chunk.token_ids, self._vocab_size)
        has_probs = bool(chunk.distributions)
        if not placement.takes_probs:
            return
        is_mixed = placement.token_ids and has_probs != bool(placement.draft_probs)
        if (has_probs and len(chunk.distributions) != len(chunk.token_ids)) or (
            is_mixed and chunk.token_ids
        ):
            raise InvalidArgumentError("distributions", "must be one per token, or none")

    def on_lost(self) -> None:
        """Lets every waiting round go on without drafts; they are opened again later."""
        for placement in self._placements.values():
            placement.is_open = False
            placement.outstanding = None
            placement.is_final.set()

    # The service itself.

    def new_request(self) -> draft_pb2.ProposeRequest:
        """An empty message."""
        return draft_pb2.ProposeRequest()

    def open_stream(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[draft_pb2.ProposeRequest]
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """Starts the Propose call."""
        call = draft_pb2_grpc.DraftServiceStub(channel).Propose(requests)
        return cast("AsyncIterator[draft_pb2.ProposeResponse]", call)

    async def fetch_info(self) -> draft_pb2.GetDraftInfoResponse:
        """Asks the draft service about itself."""
        stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        return cast(
            "draft_pb2.GetDraftInfoResponse",
            await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()),
        )

    def check_pairing(self, info: draft_pb2.GetDraftInfoResponse) -> None:
        """Checks that the draft model's token ids mean what the target's mean."""
        digest = info.token_table_digest
        if digest and digest != self._token_table_digest:
            raise PairingError(
                f"the draft model at {self.address} ({info.model}) has another token table than"
                " the target: its ids mean other text"
            )
