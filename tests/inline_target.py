"""The target's engine without its thread and its RPCs: steps are counted and looked into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from opentelemetry.sdk.trace import TracerProvider

from specdec.digest import PrefixDigest
from specdec.paged.model import PagedModel
from specdec.randomness import derive_keys
from specdec.telemetry.tracing import Tracing
from specdec.types import Proposal, SamplingParams, VerifyResult
from target_service.engine import TargetEngine
from target_service.sequence import ItemOutcome, OpenCommand, ReleaseCommand, Status, VerifyItem

GREEDY = SamplingParams(temperature=0.0)
_SESSION = 1


@dataclass(slots=True)
class Request:
    """What the orchestrator would hold of a sequence."""

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    digest: PrefixDigest = field(default_factory=PrefixDigest)
    num_rounds: int = 0
    results: list[VerifyResult] = field(default_factory=list)


class InlineTarget:
    """Sequences at one engine, a step at a time.

    Attributes:
        engine: The engine.
        first_logits: [V] float32 per sequence: what its first token was chosen from.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        context_size: int = 256,
        max_prefill_tokens: int = 16,
        max_batch_size: int = 16,
    ) -> None:
        """Makes the engine; the pool is checked after every step."""
        self.engine = TargetEngine(
            model,
            context_size=context_size,
            max_prefill_tokens=max_prefill_tokens,
            max_batch_size=max_batch_size,
            tracing=Tracing(TracerProvider(), None),
            check_integrity=True,
        )
        self.first_logits: dict[int, torch.Tensor] = {}
        self._outcomes: list[ItemOutcome] = []
        self._num_opened = 0
        self.engine.open_session(_SESSION, lambda answers, _: self._outcomes.extend(answers))
        self._watch(model)

    def _watch(self, model: PagedModel) -> None:
        """Notes the last logits of every final prefill; only one sequence at a time prefills."""
        forward = model.forward

        def watched(sequences: Sequence[object], num_logits: Sequence[int]) -> torch.Tensor:
            logits = forward(sequences, num_logits)  # type: ignore[arg-type]
            works, row = self.engine._step_works, 0
            for work, count in zip(works, num_logits, strict=True):
                row += count
                if count and work.sequence.sequence_id not in self.first_logits:
                    self.first_logits[work.sequence.sequence_id] = logits[row - count].clone()
            return logits

        model.forward = watched  # type: ignore[method-assign]

    def open(
        self,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        seed: int = 0,
        salt: bytes = b"",
    ) -> Request:
        """Takes up a sequence."""
        self._num_opened += 1
        request = Request(self._num_opened, list(token_ids), len(token_ids))
        self.engine.open_sequence(
            _SESSION,
            OpenCommand(
                sequence_id=request.sequence_id,
                epoch=1,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=params,
                keys=derive_keys(seed, choice=0),
                cache_salt=salt,
            ),
        )
        return request

    def submit(self, request: Request, drafts: Sequence[int] = ()) -> None:
        """Asks for a round."""
        self.engine.submit(
            _SESSION,
            VerifyItem(
                sequence_id=request.sequence_id,
                epoch=1,
                round_index=request.num_rounds,
                base_length=len(request.token_ids),
                digest=request.digest.digest(request.token_ids, len(request.token_ids)),
                proposal=Proposal(tuple(drafts)),
                deadline_s=None,
                traceparent="",
            ),
        )

    def step(self, requests: Sequence[Request]) -> list[Request]:
        """Runs one step; takes over what it finished.

        Returns:
            The requests whose round was finished.
        """
        if self.engine.has_work:
            self.engine.step()
        by_id = {request.sequence_id: request for request in requests}
        finished = []
        for outcome in self._outcomes:
            assert (outcome.status, outcome.detail) == (Status.OK, "")
            assert outcome.result is not None
            request = by_id[outcome.item.sequence_id]
            request.token_ids += outcome.result.output_token_ids
            request.num_rounds += 1
            request.results.append(outcome.result)
            finished.append(request)
        self._outcomes.clear()
        return finished

    def release(self, request: Request) -> None:
        """Lets a sequence go, with all its tokens retained."""
        self.engine.release_sequence(
            _SESSION, ReleaseCommand(request.sequence_id, 1, len(request.token_ids))
        )

    def generate(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        drafts: Sequence[int] = (),
        *,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        salt: bytes = b"",
    ) -> Request:
        """Runs one sequence to its end, and lets it go.

        Args:
            token_ids: The prompt.
            num_tokens: Tokens to generate.
            drafts: The expected text, prompt included, maybe partly wrong; 1 to 5 tokens
                of it are drafted per round.
            params: How tokens are chosen.
            seed: Of the draws.
            salt: Of the prefix cache.

        Returns:
            The request, with `num_tokens` tokens more.
        """
        request = self.open(token_ids, params, seed, salt)
        length = len(token_ids) + num_tokens
        while len(request.token_ids) < length:
            start = len(request.token_ids)
            self.submit(
                request, drafts[start : min(start + 1 + request.num_rounds % 5, length - 1)]
            )
            while not self.step([request]):
                pass
        del request.token_ids[length:]
        self.release(request)
        return request

    def close(self) -> None:
        """Ends the session; the pool must be whole and free. The model may be used again."""
        del self.engine._model.forward
        self.engine.close_session(_SESSION)
        self.engine.check_integrity()
        assert self.engine.num_free_blocks == self.engine._pool.num_blocks
