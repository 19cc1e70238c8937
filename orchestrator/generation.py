"""From a GenerateRequest to a sequence, and from its rounds to responses."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span

from orchestrator.output import Finish, OutputStream
from orchestrator.sequence import OutputToken, Sequence
from orchestrator.tokenization import ChatMessage, Tokenization
from specdec.errors import InvalidArgumentError
from specdec.randomness import derive_keys, fresh_seed
from specdec.telemetry import names
from specdec.telemetry.tracing import trace_id_of
from specdec.types import FinishReason
from specdec.v1 import orchestrator_pb2, target_pb2
from specdec.wire import (
    check_something_is_left,
    check_token_ids,
    sampling_from_proto,
    source_to_proto,
    speculation_from_proto,
    top_logprobs_to_proto,
)

_sequence_ids = itertools.count(1)
_FINISH_REASONS = {
    FinishReason.STOP: orchestrator_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: orchestrator_pb2.FINISH_REASON_LENGTH,
}


def encode_input(
    request: orchestrator_pb2.GenerateRequest, tokenization: Tokenization, vocab_size: int
) -> list[int]:
    """Tokenises what a request asks to continue.

    Args:
        request: With one of its inputs set.
        tokenization: The target's.
        vocab_size: Number of token ids.

    Returns:
        At least one id.

    Raises:
        InvalidArgumentError: If no input is set, or it is empty or out of range.
    """
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return tokenization.encode_prompt(request.prompt)
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise InvalidArgumentError("token_ids.ids", "must not be empty")
        check_token_ids("token_ids.ids", request.token_ids.ids, vocab_size)
        return list(request.token_ids.ids)
    if kind == "conversation":
        messages = [
            ChatMessage(message.role, message.content) for message in request.conversation.messages
        ]
        return tokenization.encode_conversation(messages)
    raise InvalidArgumentError("input", "one of prompt, token_ids, conversation must be set")


def make_sequences(
    request: orchestrator_pb2.GenerateRequest,
    token_ids: list[int],
    tokenization: Tokenization,
    target: target_pb2.GetTargetInfoResponse,
    *,
    deadline_s: float | None,
    span: Span,
) -> list[Sequence]:
    """Makes the sequences of a request, one per choice.

    Args:
        request: Validated here, but for its input.
        token_ids: The tokenised input.
        tokenization: The target's.
        target: What the target serves.
        deadline_s: time.monotonic() at which the client stops waiting; None: never.
        span: The request's span.

    Returns:
        The sequences, by index, before their first rounds.

    Raises:
        InvalidArgumentError: Naming a field and its value.
    """
    params = sampling_from_proto(request.sampling, target.vocab_size)
    eos_token_ids = () if params.ignore_eos else tuple(target.eos_token_ids)
    end_token_ids = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
    params = replace(
        params,
        end_token_ids=tuple(end_token_ids),
        bad_word_token_ids=tokenization.encode_bad_words(params.bad_words),
    )
    check_something_is_left(params, target.vocab_size)
    speculation = speculation_from_proto(request.speculation, is_seeded=params.seed is not None)
    room = target.context_size - len(token_ids)
    if room < 1:
        raise InvalidArgumentError(
            str(request.WhichOneof("input")),
            f"has {len(token_ids)} tokens; the context of {target.context_size} leaves room for a"
            f" prompt of at most {target.context_size - 1}",
            reason="PROMPT_TOO_LONG",
        )
    seed = fresh_seed() if params.seed is None else params.seed
    sequences: list[Sequence] = []
    for choice in range(params.num_choices):
        sequence = Sequence(
            sequence_id=next(_sequence_ids),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=params,
            speculation=speculation,
            keys=derive_keys(seed, choice=choice),
            output=OutputStream(
                tokenization.tokenizer,
                params,
                eos_token_ids=tuple(target.eos_token_ids),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            ),
            context_size=target.context_size,
            deadline_s=deadline_s,
            span=span,
            fork_of=sequences[0].sequence_id if sequences else None,
        )
        sequences.append(sequence)
    return sequences


@dataclass(slots=True)
class Clock:
    """When things happened to one request; time.monotonic(), in s."""

    arrival_s: float = field(default_factory=time.monotonic)
    queue_ms: float = 0.0
    """From arrival until the target took the request up."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def tick(self, queue_ms: float) -> None:
        """Notes that a round's tokens are there.

        Args:
            queue_ms: How long the round's item waited at the target.
        """
        self.last_token_s = time.monotonic()
        if not self.first_token_s:
            self.first_token_s = self.last_token_s
            self.queue_ms = queue_ms

    def timing(self, num_tokens: int) -> orchestrator_pb2.Timing:
        """Sums up, for a choice of `num_tokens` tokens."""
        between_ms = (self.last_token_s - self.first_token_s) * 1e3
        return orchestrator_pb2.Timing(
            queue_ms=self.queue_ms,
            time_to_first_token_ms=(self.first_token_s - self.arrival_s) * 1e3,
            total_ms=(time.monotonic() - self.arrival_s) * 1e3,
            mean_inter_token_ms=between_ms / (num_tokens - 1) if num_tokens > 1 else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's choices."""

    index: int
    sequence: Sequence
    clock: Clock


def to_response(
    request_id: str, choice: Choice, tokens: list[OutputToken], drafter: str
) -> orchestrator_pb2.GenerateResponse:
    """Makes one round's response; the last one sums the choice up.

    Args:
        request_id: The request's id.
        choice: After the round.
        tokens: What the round delivers.
        drafter: The drafter used; "" when speculation was off.

    Returns:
        The response.
    """
    sequence, clock = choice.sequence, choice.clock
    response = orchestrator_pb2.GenerateResponse(
        request_id=request_id,
        index=choice.index,
        text="".join(token.text for token in tokens),
        tokens=map(_token, tokens),
    )
    if sequence.finish is not None:
        response.finish.CopyFrom(_finish(sequence.finish))
        response.usage.CopyFrom(usage_of(sequence))
        response.speculation.CopyFrom(_speculation(sequence, drafter))
        response.timing.CopyFrom(clock.timing(sequence.num_completion_tokens))
        response.trace_id = trace_id_of(sequence.span)
    return response


def _token(token: OutputToken) -> orchestrator_pb2.GeneratedToken:
    message = orchestrator_pb2.GeneratedToken(
        id=token.token_id, source=source_to_proto(token.source), text=token.text
    )
    if token.logprobs is not None:
        message.logprob = token.logprobs.logprob
        message.top_logprobs.extend(top_logprobs_to_proto(token.logprobs))
    return message


def usage_of(*sequences: Sequence) -> orchestrator_pb2.Usage:
    """Counts the tokens delivered so far, over one or more choices."""
    stats = [sequence.stats for sequence in sequences]
    num_accepted = sum(each.num_accepted_tokens for each in stats)
    return orchestrator_pb2.Usage(
        prompt_tokens=sum(sequence.num_prompt_tokens for sequence in sequences),
        cached_prompt_tokens=sum(sequence.num_cached_tokens for sequence in sequences),
        completion_tokens=sum(sequence.num_completion_tokens for sequence in sequences),
        accepted_draft_tokens=num_accepted,
        rejected_draft_tokens=sum(each.num_draft_tokens for each in stats) - num_accepted,
    )


def _finish(finish: Finish) -> orchestrator_pb2.Finish:
    message = orchestrator_pb2.Finish(reason=_FINISH_REASONS[finish.reason])
    if finish.stop is not None:
        message.stop = finish.stop
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return message


def _speculation(sequence: Sequence, drafter: str) -> orchestrator_pb2.SpeculationStats:
    stats = sequence.stats
    return orchestrator_pb2.SpeculationStats(
        drafter=drafter,
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_position=stats.num_accepted_tokens_per_position,
        acceptance_rate=stats.acceptance_rate,
        mean_acceptance_length=stats.mean_acceptance_length,
    )


def trace_request(span: Span, request: orchestrator_pb2.GenerateRequest, model: str) -> None:
    """Puts what a request asks for, but never its text, on its span."""
    sampling = request.sampling
    span.set_attribute(names.REQUEST_ID, request.request_id)
    span.set_attribute(names.GEN_AI_OPERATION_NAME, "text_completion")
    span.set_attribute(names.GEN_AI_REQUEST_MODEL, model)
    for field_name, attribute in (
        ("temperature", names.GEN_AI_REQUEST_TEMPERATURE),
        ("top_p", names.GEN_AI_REQUEST_TOP_P),
        ("top_k", names.GEN_AI_REQUEST_TOP_K),
        ("max_tokens", names.GEN_AI_REQUEST_MAX_TOKENS),
    ):
        if sampling.HasField(field_name):
            span.set_attribute(attribute, getattr(sampling, field_name))
    if sampling.HasField("seed"):
        # Attributes are signed 64-bit integers; a seed may be larger.
        span.set_attribute(names.GEN_AI_REQUEST_SEED, str(sampling.seed))


def trace_end(span: Span, sequences: list[Sequence], drafter: str) -> None:
    """Puts how a request went on its span, whatever ended it: sums over its choices."""
    usage, stats = usage_of(*sequences), [sequence.stats for sequence in sequences]
    num_draft_tokens = sum(each.num_draft_tokens for each in stats)
    num_accepted = usage.accepted_draft_tokens
    span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, sequences[0].num_prompt_tokens)
    span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens)
    span.set_attribute(names.DRAFTER, drafter)
    span.set_attribute(names.NUM_ROUNDS, sum(each.num_rounds for each in stats))
    span.set_attribute(names.NUM_DRAFT_TOKENS, num_draft_tokens)
    span.set_attribute(names.NUM_ACCEPTED_TOKENS, num_accepted)
    span.set_attribute(
        names.ACCEPTANCE_RATE, num_accepted / num_draft_tokens if num_draft_tokens else 0.0
    )
    finishes = [sequence.finish for sequence in sequences]
    if None not in finishes:
        reasons = [finish.reason.value for finish in finishes if finish is not None]
        span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
