from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service.settings import DraftSettings
from specdec.errors import InvalidArgumentError
from specdec.randomness import derive_keys
from specdec.types import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    DraftDistribution,
    SamplingParams,
    TokenSource,
)
from specdec.v1 import orchestrator_pb2 as pb
from specdec.v1 import target_pb2, tensor_pb2
from specdec.wire import (
    bad_words_to_proto,
    check_token_ids,
    distribution_from_proto,
    distribution_to_proto,
    keys_from_proto,
    keys_to_proto,
    opening_params,
    sampling_from_proto,
    sampling_to_proto,
    source_to_proto,
    speculation_from_proto,
)

VOCAB_SIZE = 100
SPARSE = tensor_pb2.DISTRIBUTION_FORM_SPARSE
DENSE = tensor_pb2.DISTRIBUTION_FORM_DENSE


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def ids(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


# Distributions.


def random_distribution(size: int, is_sparse: bool) -> DraftDistribution:
    rng = np.random.default_rng(size)
    probs = rng.dirichlet(np.full(size, 0.2)).astype(np.float32)
    token_ids = rng.permutation(10 * size)[:size].astype(np.uint32) if is_sparse else None
    return DraftDistribution(probs, token_ids)


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("size", [1, 2, 60, 5000])
def test_distributions_arrive_bit_for_bit(size: int, is_sparse: bool) -> None:
    sent = random_distribution(size, is_sparse)
    data = distribution_to_proto(sent).SerializeToString()
    read = distribution_from_proto(tensor_pb2.DraftDistribution.FromString(data), 10 * size)
    assert read.probs.dtype == np.float32
    assert read.probs.tobytes() == sent.probs.tobytes()
    if is_sparse:
        assert read.token_ids is not None
        assert sent.token_ids is not None
        assert read.token_ids.dtype == np.uint32
        assert read.token_ids.tobytes() == sent.token_ids.tobytes()
    else:
        assert read.token_ids is None


def test_subnormal_probabilities_and_signed_zero_survive() -> None:
    probs = np.array([1.0, 1e-45, -0.0], dtype=np.float32)
    read = distribution_from_proto(distribution_to_proto(DraftDistribution(probs, None)), 3)
    assert read.probs.tobytes() == probs.tobytes()


def test_the_default_sparse_form_is_under_half_a_kilobyte() -> None:
    support = DraftSettings.model_fields["sparse_support"].default
    assert distribution_to_proto(random_distribution(support, True)).ByteSize() < 512


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"probs": floats(1.0)},
        {"form": 99, "probs": floats(1.0)},
        {"form": DENSE},
        {"form": DENSE, "probs": floats(*[1 / 101] * 101)},
        {"form": DENSE, "probs": floats(1.0)[:3]},
        {"form": DENSE, "probs": floats(0.5, 0.4)},
        {"form": DENSE, "probs": floats(0.5, 0.6)},
        {"form": DENSE, "probs": floats(1.5, -0.5)},
        {"form": DENSE, "probs": floats(0.0, 0.0)},
        {"form": DENSE, "probs": floats(1.0, float("nan"))},
        {"form": DENSE, "probs": floats(float("inf"), 0.0)},
        {"form": DENSE, "probs": floats(float("inf"), float("-inf"))},
        {"form": SPARSE},
        {"form": SPARSE, "probs": floats(1.0)},
        {"form": SPARSE, "probs": floats(0.5, 0.5), "token_ids": ids(1)},
        {"form": SPARSE, "probs": floats(1.0), "token_ids": ids(1, 2)},
        {"form": SPARSE, "probs": floats(1.0), "token_ids": ids(1)[:2]},
        {"form": SPARSE, "probs": floats(1.0), "token_ids": ids(100)},
        {"form": SPARSE, "probs": floats(1.0), "token_ids": ids(2**32 - 1)},
        {"form": SPARSE, "probs": floats(0.5, 0.5), "token_ids": ids(7, 7)},
        {"form": SPARSE, "probs": floats(0.5, 0.4), "token_ids": ids(7, 8)},
        {"form": SPARSE, "probs": floats(float("nan")), "token_ids": ids(7)},
    ],
)
def test_malformed_distributions_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="distributions"):
        distribution_from_proto(tensor_pb2.DraftDistribution(**fields), VOCAB_SIZE)


def test_a_dense_distribution_may_end_early() -> None:
    message = tensor_pb2.DraftDistribution(form=DENSE, probs=floats(0.5, 0.5))
    assert distribution_from_proto(message, VOCAB_SIZE).probs.tolist() == [0.5, 0.5]


# Sampling parameters.


def test_what_is_unset_is_the_default() -> None:
    assert sampling_from_proto(pb.SamplingParams(), VOCAB_SIZE) == SamplingParams()


def test_an_explicit_zero_is_not_unset() -> None:
    read = sampling_from_proto(pb.SamplingParams(temperature=0.0, seed=0), VOCAB_SIZE)
    assert read.temperature == 0.0
    assert read.is_greedy
    assert read.seed == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("n", 65),
        ("n", 0),
        ("logprobs", 21),
        ("allowed_token_ids", [VOCAB_SIZE]),
        ("bad_words", [" "]),
    ],
)
def test_bad_and_unsupported_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        sampling_from_proto(pb.SamplingParams(**{field: value}), VOCAB_SIZE)


def test_values_that_mean_off_are_taken() -> None:
    message = pb.SamplingParams(
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        include_stop_str_in_output=False,
        n=1,
        top_k=-1,
        top_p=1.0,
    )
    assert sampling_from_proto(message, VOCAB_SIZE) == SamplingParams()


def test_what_shapes_the_distribution_travels_on() -> None:
    """All of it, bit for bit; what only the orchestrator needs stays behind."""
    shaping = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.6,
        "logit_bias": {7: 1.5, 3: -2.0},
        "allowed_token_ids": [9, 3, 9, 7],
        "min_tokens": 4,
    }
    message = pb.SamplingParams(
        **shaping, seed=3, max_tokens=9, stop=["x"], ignore_eos=True, bad_words=["t1"]
    )
    read = replace(
        sampling_from_proto(message, VOCAB_SIZE),
        end_token_ids=(2, 5),
        bad_word_token_ids=((1,), (4, 2)),
    )
    opening = target_pb2.OpenSequence(
        sampling=sampling_to_proto(read),
        end_token_ids=read.end_token_ids,
        bad_word_token_ids=bad_words_to_proto(read),
    )
    again = opening_params(opening, VOCAB_SIZE)
    assert again == replace(
        read, seed=None, max_tokens=None, stop=(), ignore_eos=False, bad_words=()
    )
    assert read.allowed_token_ids == (3, 7, 9)
    assert read.logit_bias == ((3, -2.0), (7, 1.5))


@pytest.mark.parametrize(
    "fields",
    [
        {"end_token_ids": [VOCAB_SIZE]},
        {"bad_word_token_ids": [pb.TokenIds(ids=[])]},
        {"bad_word_token_ids": [pb.TokenIds(ids=[1, VOCAB_SIZE])]},
        {"bad_word_token_ids": [pb.TokenIds(ids=[i]) for i in range(VOCAB_SIZE)]},
    ],
)
def test_malformed_openings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        opening_params(target_pb2.OpenSequence(**fields), VOCAB_SIZE)


def test_greedy_stays_greedy_on_the_way() -> None:
    message = sampling_to_proto(SamplingParams(temperature=0.0))
    assert message.HasField("temperature")
    assert sampling_from_proto(message, VOCAB_SIZE).is_greedy


# Speculation.


@pytest.mark.parametrize(
    ("acceptance", "is_seeded", "expected"),
    [
        (pb.ACCEPTANCE_UNSPECIFIED, False, Acceptance.REJECTION),
        (pb.ACCEPTANCE_UNSPECIFIED, True, Acceptance.COUPLED),
        (pb.ACCEPTANCE_REJECTION, True, Acceptance.REJECTION),
        (pb.ACCEPTANCE_COUPLED, False, Acceptance.COUPLED),
    ],
)
def test_the_acceptance_follows_the_seed(
    acceptance: pb.Acceptance, is_seeded: bool, expected: Acceptance
) -> None:
    message = pb.SpeculationParams(acceptance=acceptance)
    assert speculation_from_proto(message, is_seeded=is_seeded).acceptance is expected


def test_speculation_unset_and_zero_differ() -> None:
    unset = speculation_from_proto(pb.SpeculationParams(), is_seeded=False)
    assert unset.enabled
    assert unset.num_speculative_tokens is None
    message = pb.SpeculationParams(enabled=False, num_speculative_tokens=0, drafter="ngram")
    read = speculation_from_proto(message, is_seeded=False)
    assert not read.enabled
    assert read.num_speculative_tokens == 0
    assert read.drafter == "ngram"


@pytest.mark.parametrize(
    "fields", [{"num_speculative_tokens": MAX_DRAFT_TOKENS + 1}, {"acceptance": 9}]
)
def test_bad_speculation_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(fields))):
        speculation_from_proto(pb.SpeculationParams(**fields), is_seeded=False)


# Small things.


def test_keys_travel_whole() -> None:
    keys = derive_keys(2**64 - 1, 5)
    data = keys_to_proto(keys).SerializeToString()
    assert keys_from_proto(target_pb2.SamplingKeys.FromString(data)) == keys


def test_every_source_has_a_name_on_the_wire() -> None:
    sources = {source_to_proto(source) for source in TokenSource}
    assert len(sources) == len(TokenSource)
    assert 0 not in sources


def test_ids_are_bounded_and_the_first_bad_one_is_named() -> None:
    check_token_ids("ids", [], 5)
    check_token_ids("ids", [0, 4], 5)
    with pytest.raises(InvalidArgumentError, match=r"ids\[1\]"):
        check_token_ids("ids", [4, 5, 6], 5)
