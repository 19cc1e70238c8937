"""Between proto messages and plain types: the only place that knows both.

Reading validates: a value that is out of range, not finite or not supported
raises InvalidArgumentError naming field and value.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from specdec.errors import InvalidArgumentError
from specdec.types import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    DraftDistribution,
    SamplingKeys,
    SamplingParams,
    SpeculationParams,
    TokenLogprobs,
    TokenSource,
)
from specdec.v1 import draft_pb2, orchestrator_pb2, target_pb2, tensor_pb2

MAX_STOP_STRINGS = 16
SUPPORTED_SAMPLING_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "n",
    "allowed_token_ids",
    "bad_words",
)
_MAX_BIASES, _MAX_BAD_WORDS = 1024, 256
MAX_LOGPROBS = 20
MAX_CHOICES = 64

_SOURCES_TO_PROTO = {
    TokenSource.ACCEPTED: orchestrator_pb2.TOKEN_SOURCE_ACCEPTED,
    TokenSource.RECOVERED: orchestrator_pb2.TOKEN_SOURCE_RECOVERED,
    TokenSource.BONUS: orchestrator_pb2.TOKEN_SOURCE_BONUS,
    TokenSource.TARGET: orchestrator_pb2.TOKEN_SOURCE_TARGET,
}
ACCEPTANCES_TO_PROTO = {
    Acceptance.REJECTION: orchestrator_pb2.ACCEPTANCE_REJECTION,
    Acceptance.COUPLED: orchestrator_pb2.ACCEPTANCE_COUPLED,
}


def sampling_from_proto(
    message: orchestrator_pb2.SamplingParams, vocab_size: int
) -> SamplingParams:
    """Reads and validates sampling parameters.

    Args:
        message: As sent by the client.
        vocab_size: Number of token ids; bounds the ids given.

    Returns:
        The parameters, with defaults filled in.

    Raises:
        InvalidArgumentError: Naming the field and the value given.
    """
    num_choices = message.n if message.HasField("n") else 1
    if not 1 <= num_choices <= MAX_CHOICES:
        raise _bad("sampling.n", f"must be in 1..{MAX_CHOICES}", num_choices)
    temperature = message.temperature if message.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise _bad("sampling.temperature", "must be finite and at least 0", temperature)
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not 0.0 < top_p <= 1.0:
        raise _bad("sampling.top_p", "must be in (0, 1]", top_p)
    top_k = message.top_k if message.HasField("top_k") else 0
    if top_k < -1:
        raise _bad("sampling.top_k", "must be -1 or 0 (off) or at least 1", top_k)
    min_p = message.min_p
    if not 0.0 <= min_p <= 1.0:
        raise _bad("sampling.min_p", "must be in [0, 1]", min_p)
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not (math.isfinite(repetition) and repetition > 0.0):
        raise _bad("sampling.repetition_penalty", "must be finite and above 0", repetition)
    for field in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= (value := getattr(message, field)) <= 2.0:
            raise _bad(f"sampling.{field}", "must be in [-2, 2]", value)
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens == 0:
        raise _bad("sampling.max_tokens", "must be at least 1", max_tokens)
    if max_tokens is not None and message.min_tokens > max_tokens:
        detail = f"must be at most max_tokens, {max_tokens}"
        raise _bad("sampling.min_tokens", detail, message.min_tokens)
    if message.logprobs > MAX_LOGPROBS:
        raise _bad("sampling.logprobs", f"must be at most {MAX_LOGPROBS}", message.logprobs)
    _check_lists(message, vocab_size)
    if len(message.stop) > MAX_STOP_STRINGS:
        raise _bad("sampling.stop", f"takes at most {MAX_STOP_STRINGS} strings", len(message.stop))
    if "" in message.stop:
        raise _bad("sampling.stop", "must not hold an empty string", list(message.stop))
    check_token_ids("sampling.stop_token_ids", message.stop_token_ids, vocab_size)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        num_choices=num_choices,
        allowed_token_ids=tuple(sorted(set(message.allowed_token_ids))),
        bad_words=tuple(message.bad_words),
        min_tokens=message.min_tokens,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        include_stop_str_in_output=message.include_stop_str_in_output,
    )


def _check_lists(message: orchestrator_pb2.SamplingParams, vocab_size: int) -> None:
    """Checks biases, allowed ids and bad words, each by itself."""
    field = "sampling.logit_bias"
    if len(message.logit_bias) > _MAX_BIASES:
        raise _bad(field, f"takes at most {_MAX_BIASES} entries", len(message.logit_bias))
    for token_id, bias in message.logit_bias.items():
        if token_id >= vocab_size:
            raise _bad(f"{field}[{token_id}]", f"ids must be below {vocab_size}", token_id)
        if not -100.0 <= bias <= 100.0:
            raise _bad(f"{field}[{token_id}]", "must be in [-100, 100]", bias)
    check_token_ids("sampling.allowed_token_ids", message.allowed_token_ids, vocab_size)
    field = "sampling.bad_words"
    if len(message.bad_words) > _MAX_BAD_WORDS:
        raise _bad(field, f"takes at most {_MAX_BAD_WORDS} strings", len(message.bad_words))
    for index, word in enumerate(message.bad_words):
        if not word.strip():
            raise _bad(f"{field}[{index}]", "must not be empty or all space", repr(word))


def check_something_is_left(params: SamplingParams, vocab_size: int) -> None:
    """Checks that masks always leave a token to emit.

    Args:
        params: With end ids and bad words as ids.
        vocab_size: Number of token ids.

    Raises:
        InvalidArgumentError: If the allowed ids less those that may be masked are none.
    """
    masked = {word[-1] for word in params.bad_word_token_ids}
    if params.min_tokens:
        masked.update(params.end_token_ids)
    allowed = params.allowed_token_ids
    num_left = len(set(allowed) - masked) if allowed else vocab_size - len(masked)
    if num_left < 1:
        field = "sampling.allowed_token_ids" if allowed else "sampling.bad_words"
        description = "leave no token once min_tokens and bad_words are obeyed"
        raise _bad(field, description, list(allowed or params.bad_words)[:8])


def opening_params(
    message: target_pb2.OpenSequence | draft_pb2.OpenDraft, vocab_size: int
) -> SamplingParams:
    """Reads and validates the parameters of an opening; as `sampling_from_proto`.

    Args:
        message: As sent by the orchestrator.
        vocab_size: Number of token ids.

    Returns:
        The parameters, with what only ids can say.

    Raises:
        InvalidArgumentError: Naming the field and the value given.
    """
    params = sampling_from_proto(message.sampling, vocab_size)
    check_token_ids("end_token_ids", message.end_token_ids, vocab_size)
    words = []
    for index, word in enumerate(message.bad_word_token_ids):
        if not word.ids:
            raise _bad(f"bad_word_token_ids[{index}]", "must not be empty", [])
        check_token_ids(f"bad_word_token_ids[{index}]", word.ids, vocab_size)
        words.append(tuple(word.ids))
    params = replace(
        params, end_token_ids=tuple(message.end_token_ids), bad_word_token_ids=tuple(words)
    )
    check_something_is_left(params, vocab_size)
    return params


def speculation_from_proto(
    message: orchestrator_pb2.SpeculationParams, *, is_seeded: bool
) -> SpeculationParams:
    """Reads and validates speculation parameters.

    Args:
        message: As sent by the client.
        is_seeded: Whether the request has a seed, which decides the default acceptance.

    Returns:
        The parameters; the drafter's name is not checked here.

    Raises:
        InvalidArgumentError: Naming the field and the value given.
    """
    num_tokens = None
    if message.HasField("num_speculative_tokens"):
        num_tokens = message.num_speculative_tokens
        if num_tokens > MAX_DRAFT_TOKENS:
            raise _bad(
                "speculation.num_speculative_tokens",
                f"must be at most {MAX_DRAFT_TOKENS}",
                num_tokens,
            )
    acceptances = {proto: value for value, proto in ACCEPTANCES_TO_PROTO.items()}
    acceptances[orchestrator_pb2.ACCEPTANCE_UNSPECIFIED] = (
        Acceptance.COUPLED if is_seeded else Acceptance.REJECTION
    )
    if message.acceptance not in acceptances:
        raise _bad("speculation.acceptance", "is not a known acceptance", message.acceptance)
    return SpeculationParams(
        enabled=message.enabled if message.HasField("enabled") else True,
        num_speculative_tokens=num_tokens,
        acceptance=acceptances[message.acceptance],
        drafter=message.drafter,
    )


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Checks that all ids can be emitted.

    Args:
        field: Path of the field, for the error.
        token_ids: Non-negative ids.
        vocab_size: Number of token ids.

    Raises:
        InvalidArgumentError: Naming the first id that is out of range.
    """
    if max(token_ids, default=0) >= vocab_size:
        index, token_id = next((i, x) for i, x in enumerate(token_ids) if x >= vocab_size)
        raise _bad(f"{field}[{index}]", f"must be below {vocab_size}", token_id)


def _bad(field: str, expected: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(field, f"{expected} (got {value})")


def sampling_to_proto(params: SamplingParams) -> orchestrator_pb2.SamplingParams:
    """Writes what a service needs to shape a distribution; stop rules stay behind."""
    return orchestrator_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> target_pb2.OutputLogprobs:
    """Writes log-probabilities, bit for bit."""
    return target_pb2.OutputLogprobs(logprob=logprobs.logprob, top=top_logprobs_to_proto(logprobs))


def top_logprobs_to_proto(logprobs: TokenLogprobs) -> list[orchestrator_pb2.TokenLogprob]:
    """Writes the alternatives."""
    return [orchestrator_pb2.TokenLogprob(id=i, logprob=value) for i, value in logprobs.top]


def logprobs_from_proto(message: target_pb2.OutputLogprobs) -> TokenLogprobs:
    """Reads log-probabilities."""
    return TokenLogprobs(message.logprob, tuple((top.id, top.logprob) for top in message.top))


def bad_words_to_proto(params: SamplingParams) -> list[orchestrator_pb2.TokenIds]:
    """Writes bad words as ids."""
    return [orchestrator_pb2.TokenIds(ids=word) for word in params.bad_word_token_ids]


def keys_to_proto(keys: SamplingKeys) -> target_pb2.SamplingKeys:
    """Writes subkeys."""
    return target_pb2.SamplingKeys(
        propose=keys.propose, accept=keys.accept, residual=keys.residual, target=keys.target
    )


def keys_from_proto(message: target_pb2.SamplingKeys) -> SamplingKeys:
    """Reads subkeys."""
    return SamplingKeys(
        propose=message.propose,
        accept=message.accept,
        residual=message.residual,
        target=message.target,
    )


def source_to_proto(source: TokenSource) -> orchestrator_pb2.TokenSource:
    """Writes where a token came from."""
    return _SOURCES_TO_PROTO[source]


def distribution_to_proto(distribution: DraftDistribution) -> tensor_pb2.DraftDistribution:
    """Writes a distribution in the form it was sampled in."""
    probs = distribution.probs.astype("<f4", copy=False).tobytes()
    if distribution.token_ids is None:
        return tensor_pb2.DraftDistribution(form=tensor_pb2.DISTRIBUTION_FORM_DENSE, probs=probs)
    return tensor_pb2.DraftDistribution(
        form=tensor_pb2.DISTRIBUTION_FORM_SPARSE,
        token_ids=distribution.token_ids.astype("<u4", copy=False).tobytes(),
        probs=probs,
    )


def distribution_from_proto(
    message: tensor_pb2.DraftDistribution, vocab_size: int
) -> DraftDistribution:
    """Reads and validates a distribution.

    Args:
        message: SPARSE or DENSE.
        vocab_size: Number of token ids; bounds ids and the dense length.

    Returns:
        The distribution, bit for bit as sent.

    Raises:
        InvalidArgumentError: If lengths disagree, an id is out of range or
            twice there, or the probabilities are not a distribution.
    """
    field = "distributions"
    if len(message.probs) % 4 or len(message.token_ids) % 4:
        raise _bad(f"{field}.probs", "must be 4-byte elements", len(message.probs))
    probs = np.frombuffer(message.probs, dtype="<f4").astype(np.float32)
    token_ids = None
    if message.form == tensor_pb2.DISTRIBUTION_FORM_SPARSE:
        token_ids = np.frombuffer(message.token_ids, dtype="<u4").astype(np.uint32)
        if len(token_ids) != len(probs):
            raise _bad(f"{field}.token_ids", f"must hold {len(probs)} ids", len(token_ids))
        if len(token_ids) and int(token_ids.max()) >= vocab_size:
            raise _bad(f"{field}.token_ids", f"must be below {vocab_size}", int(token_ids.max()))
        if len(np.unique(token_ids)) != len(token_ids):
            raise _bad(f"{field}.token_ids", "must not repeat an id", token_ids.tolist()[:8])
    elif message.form != tensor_pb2.DISTRIBUTION_FORM_DENSE:
        raise _bad(f"{field}.form", "must be SPARSE or DENSE", message.form)
    if not 0 < len(probs) <= vocab_size:
        raise _bad(f"{field}.probs", f"must hold 1 to {vocab_size} elements", len(probs))
    # A NaN fails both comparisons.
    if not ((probs >= 0.0) & (probs <= 1.0)).all():
        raise InvalidArgumentError(f"{field}.probs", "must hold probabilities")
    if abs(float(probs.sum(dtype=np.float64)) - 1.0) > 1e-4:
        raise _bad(f"{field}.probs", "must sum to 1", float(probs.sum()))
    return DraftDistribution(probs, token_ids)
