"""Continuous batching over the target's engine, in this process.

Decoding is plain: each round verifies no drafts. A sequence that ends makes
room for the next one while the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.sdk.trace import TracerProvider
from tokenizers import Tokenizer

from orchestrator.output import Finish, OutputStream
from specdec.digest import PrefixDigest
from specdec.paged.loading import LoadedModel
from specdec.telemetry.tracing import Tracing
from specdec.types import Proposal, SamplingKeys, SamplingParams
from target_service.engine import TargetEngine
from target_service.sequence import ItemOutcome, OpenCommand, ReleaseCommand, Status, VerifyItem

_SESSION_ID = 1
_EPOCH = 1
_MAX_PREFILL_TOKENS = 512


class BatchError(RuntimeError):
    """The engine could not compute a sequence; the message says why."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a sequence was continued with."""

    sequence_id: int
    token_ids: tuple[int, ...]
    """The new tokens, the one that ended it included."""
    text: str
    """Without control tokens, and up to the stop string if one was found."""
    finish: Finish


@dataclass(slots=True)
class _Running:
    """One sequence on its way."""

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    output: OutputStream
    digest: PrefixDigest = field(default_factory=PrefixDigest)
    text: str = ""
    round_index: int = 0


class Batch:
    """Sequences decoded together.

    Attributes:
        num_decoded_tokens: Tokens made so far.
    """

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, max_size: int) -> None:
        """Makes an engine and drives it from the calling thread.

        Args:
            loaded: The model over its pool.
            tokenizer: Decodes.
            max_size: Most sequences at once.
        """
        self._eos_token_ids = loaded.eos_token_ids
        self._tokenizer = tokenizer
        self._max_size = max_size
        self._engine = TargetEngine(
            loaded.model,
            context_size=loaded.context_size,
            max_prefill_tokens=_MAX_PREFILL_TOKENS,
            max_batch_size=max_size,
            max_sequences=max_size,
            tracing=Tracing(TracerProvider(), None),
        )
        self._outcomes: list[ItemOutcome] = []
        self._engine.open_session(_SESSION_ID, lambda answers, _: self._outcomes.extend(answers))
        self._running: dict[int, _Running] = {}
        self.num_decoded_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences on their way."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether another sequence may start."""
        return self.num_running < self._max_size

    def start(
        self,
        sequence_id: int,
        token_ids: list[int],
        params: SamplingParams,
        keys: SamplingKeys,
        *,
        max_tokens: int,
    ) -> None:
        """Starts a sequence with the next step.

        Args:
            sequence_id: Not used before.
            token_ids: What to continue, at least one token.
            params: How to choose tokens, and what ends the sequence.
            keys: Of its draws.
            max_tokens: Tokens after which it ends, at least 1; with `token_ids`
                they must fit the context.
        """
        self._engine.open_sequence(
            _SESSION_ID,
            OpenCommand(
                sequence_id=sequence_id,
                epoch=_EPOCH,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=params,
                keys=keys,
            ),
        )
        output = OutputStream(
            self._tokenizer, params, eos_token_ids=self._eos_token_ids, max_tokens=max_tokens
        )
        running = _Running(sequence_id, list(token_ids), len(token_ids), output)
        self._running[sequence_id] = running
        self._submit(running)

    def step(self) -> list[Continuation]:
        """Computes one step of all sequences.

        Returns:
            Those that ended.

        Raises:
            BatchError: If the engine could not compute a sequence.
        """
        if self._engine.has_work:
            self._engine.step()
        outcomes, self._outcomes = self._outcomes, []
        ended = (self._take(outcome) for outcome in outcomes)
        return [continuation for continuation in ended if continuation is not None]

    def _submit(self, running: _Running) -> None:
        length = len(running.token_ids)
        self._engine.submit(
            _SESSION_ID,
            VerifyItem(
                sequence_id=running.sequence_id,
                epoch=_EPOCH,
                round_index=running.round_index,
                base_length=length,
                digest=running.digest.digest(running.token_ids, length),
                proposal=Proposal(),
                deadline_s=None,
                traceparent="",
            ),
        )

    def _take(self, outcome: ItemOutcome) -> Continuation | None:
        """Takes a round's token; asks for the next one, or lets the sequence go."""
        running = self._running[outcome.item.sequence_id]
        if outcome.status is not Status.OK:
            detail = f"{outcome.status.value}: {outcome.detail}"
            raise BatchError(f"sequence {running.sequence_id} could not be computed: {detail}")
        assert outcome.result is not None
        (token_id,) = outcome.result.output_token_ids
        self.num_decoded_tokens += 1
        running.token_ids.append(token_id)
        released, finish = running.output.push(token_id)
        running.text += released
        if finish is None:
            running.round_index += 1
            self._submit(running)
            return None
        del self._running[running.sequence_id]
        self._engine.release_sequence(
            _SESSION_ID,
            ReleaseCommand(running.sequence_id, _EPOCH, len(running.token_ids)),
        )
        output_ids = tuple(running.token_ids[running.num_prompt_tokens :])
        return Continuation(running.sequence_id, output_ids, running.text, finish)
