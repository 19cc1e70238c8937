"""The acceptance rules: by hand, by exact enumeration, and by counting.

The enumeration computes the law of the first n output tokens of rounds in
float64, through `accept_probs` and `residual_probs` as production calls them,
and compares it with the target's law of n tokens: the rule is exact, not just
close.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from specdec.randomness import derive_keys, uniform_prob, uniform_probs
from specdec.sampling import draw_from_distribution
from specdec.types import DraftDistribution, SamplingParams
from target_service.acceptance import (
    Chain,
    ChainOutcome,
    accept_probs,
    is_redrawn,
    redraw,
    residual_probs,
    verify_chains,
)

SAMPLED = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
KEYS = derive_keys(1, 0)


def chain(
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[DraftDistribution] = (),
    params: SamplingParams = SAMPLED,
    seed: int = 1,
    base_length: int = 10,
) -> Chain:
    return Chain(
        draft_token_ids=tuple(draft_token_ids),
        draft_probs=tuple(draft_probs),
        params=params,
        keys=derive_keys(seed, 0),
        base_length=base_length,
    )


def dense(probs: Sequence[float] | np.ndarray) -> DraftDistribution:
    return DraftDistribution(np.asarray(probs, dtype=np.float32), None)


def logits_of(*rows: Sequence[float] | np.ndarray) -> torch.Tensor:
    """Logits whose softmax are the rows."""
    return torch.from_numpy(np.log(np.maximum(np.array(rows), 1e-38))).float()


def one_hot(*token_ids: int, vocab_size: int = 10) -> torch.Tensor:
    """Rows whose argmax, and only possible draw, are the tokens."""
    rows = torch.full((len(token_ids), vocab_size), -1e9)
    rows[range(len(token_ids)), list(token_ids)] = 0.0
    return rows


# By hand.


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("drafts", "own", "output", "num_accepted"),
    [
        ([7, 7, 5], [7, 7, 2, 9], (7, 7, 2), 2),
        ([7, 7, 2], [7, 7, 2, 9], (7, 7, 2, 9), 3),
        ([1, 7, 2], [7, 7, 2, 9], (7,), 0),
        # A match behind the first difference does not count.
        ([7, 1, 2], [7, 7, 2, 9], (7, 7), 1),
        ([], [4], (4,), 0),
    ],
)
def test_match_by_hand(
    params: SamplingParams,
    drafts: list[int],
    own: list[int],
    output: tuple[int, ...],
    num_accepted: int,
) -> None:
    outcomes = verify_chains(one_hot(*own), [chain(drafts, params=params)])
    assert outcomes == [ChainOutcome(output, num_accepted)]


def test_greedy_ignores_the_draft_probs_and_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, 4)
    logits[:, 1:3] = 5.0
    q = [dense([0.0, 0.0, 1.0, 0.0])]
    assert verify_chains(logits, [chain([2], q, GREEDY)]) == [ChainOutcome((1,), 0)]
    assert verify_chains(logits, [chain([1], q, GREEDY)]) == [ChainOutcome((1, 1), 1)]


def test_rejection_by_hand() -> None:
    q = [dense([0.5, 0.5, 0.0])] * 2
    target = logits_of([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    # p = q is accepted; p = 0 is not, and the residual is all on token 2.
    assert verify_chains(target, [chain([0, 1], q)]) == [ChainOutcome((0, 2), 1)]
    # All accepted: the bonus is drawn from the last row.
    assert verify_chains(target[[0, 0, 2]], [chain([0, 1], q)]) == [ChainOutcome((0, 1, 1), 2)]


def test_the_two_functions_by_hand() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.4, 0.3, 0.1])
    torch.testing.assert_close(accept_probs(p, q), torch.tensor([0.5, 1.0, 1.0]))
    torch.testing.assert_close(
        residual_probs(p[None], q[None]), torch.tensor([[0.0, 0.0, 0.4]]), rtol=0, atol=1e-7
    )


def test_chains_of_one_step_do_not_know_of_each_other() -> None:
    rng = np.random.default_rng(0)
    chains, rows = [], []
    for i in range(40):
        num_drafts = i % 4
        qs = [dense(rng.dirichlet(np.ones(12))) for _ in range(num_drafts)]
        drafts = [int(rng.choice(12, p=q.probs / q.probs.sum())) for q in qs]
        params = SamplingParams(temperature=[1.0, 0.0, 0.7][i % 3], top_k=[0, 5][i % 2])
        has_probs = i % 5 != 0
        chains.append(chain(drafts, qs if has_probs else (), params, seed=i, base_length=5 + i))
        rows.append(torch.from_numpy(rng.normal(size=(num_drafts + 1, 12))).float())
    together = verify_chains(torch.cat(rows), chains)
    assert together == [
        outcome
        for part, row in zip(chains, rows, strict=True)
        for outcome in verify_chains(row, [part])
    ]
    order = rng.permutation(40).tolist()
    shuffled = verify_chains(torch.cat([rows[i] for i in order]), [chains[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_sparse_and_dense_forms_decide_the_same() -> None:
    rng = np.random.default_rng(1)
    for seed in range(100):
        support = rng.permutation(20)[:5]
        probs = rng.dirichlet(np.ones(5)).astype(np.float32)
        full = np.zeros(20, dtype=np.float32)
        full[support] = probs
        logits = torch.from_numpy(rng.normal(size=(2, 20))).float()
        token_id = int(rng.choice(support))
        sparse = DraftDistribution(probs, support.astype(np.uint32))
        outcomes = [
            verify_chains(logits, [chain([token_id], [q], seed=seed)])
            for q in (sparse, dense(full))
        ]
        assert outcomes[0] == outcomes[1]


# Exactly.

Law = Callable[[tuple[int, ...]], torch.Tensor]
"""From the tokens so far to the probabilities of the next one, float64."""


def markov_law(seed: int, vocab_size: int, share_of_zeros: float = 0.0) -> Law:
    """Random probabilities that depend on all tokens so far."""

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        rng = np.random.default_rng([seed, *prefix])
        probs = rng.dirichlet(np.full(vocab_size, 0.7))
        keep = rng.random(vocab_size) >= share_of_zeros
        keep[rng.integers(vocab_size)] = True
        probs = np.where(keep, probs + 1e-3, 0.0)
        return torch.from_numpy(probs / probs.sum())

    return law


def disjoint(law: Law) -> tuple[Law, Law]:
    """P on the even ids, q on the odd ones."""

    def part(remainder: int) -> Law:
        def masked(prefix: tuple[int, ...]) -> torch.Tensor:
            probs = law(prefix)
            probs = torch.where(torch.arange(len(probs)) % 2 == remainder, probs, 0.0)
            return probs / probs.sum()

        return masked

    return part(0), part(1)


def nearly(law: Law, distance: float) -> Law:
    def moved(prefix: tuple[int, ...]) -> torch.Tensor:
        probs = law(prefix)
        probs = probs * (1 + distance * torch.cos(torch.arange(len(probs), dtype=torch.float64)))
        return probs / probs.sum()

    return moved


def peaky(vocab_size: int) -> Law:
    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        probs = torch.full((vocab_size,), 1e-3 / (vocab_size - 1), dtype=torch.float64)
        probs[len(prefix) % vocab_size] = 1 - 1e-3
        return probs

    return law


def enumerate_output(
    p: Law, q: Law, num_draft_tokens: int, length: int, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The law of the first `length` output tokens of rounds of rejection."""
    if length == 0:
        return {prefix: 1.0}
    law: dict[tuple[int, ...], float] = {}

    def emit(output: tuple[int, ...], weight: float) -> None:
        if weight == 0.0:
            return
        if len(output) >= length:
            output = output[:length]
            law[output] = law.get(output, 0.0) + weight
            return
        # The next round, with the tokens of this one committed.
        more = enumerate_output(
            lambda after: p(output + after),
            lambda after: q(output + after),
            num_draft_tokens,
            length - len(output),
        )
        for rest, share in more.items():
            law[output + rest] = law.get(output + rest, 0.0) + weight * share

    def walk(drafted: tuple[int, ...], weight: float) -> None:
        target = p(drafted)
        if len(drafted) == num_draft_tokens:
            for token_id, share in enumerate(target.tolist()):
                emit((*drafted, token_id), weight * share)
            return
        draft = q(drafted)
        token_ids = draft.nonzero()[:, 0]
        accepted = accept_probs(target[token_ids], draft[token_ids])
        residual = residual_probs(target[None], draft[None])[0]
        residual = residual / residual.sum()
        for token_id, accept in zip(token_ids.tolist(), accepted.tolist(), strict=True):
            drawn = weight * float(draft[token_id])
            if accept > 0.0:
                walk((*drafted, token_id), drawn * accept)
            for recovered, share in enumerate(residual.tolist()):
                emit((*drafted, recovered), drawn * (1.0 - accept) * share)

    walk((), 1.0)
    return law


def enumerate_target(p: Law, vocab_size: int, length: int) -> dict[tuple[int, ...], float]:
    law = {}
    for output in itertools.product(range(vocab_size), repeat=length):
        weight = 1.0
        for i, token_id in enumerate(output):
            weight *= float(p(output[:i])[token_id])
        law[output] = weight
    return law


def pair_of(kind: str, vocab_size: int) -> tuple[Law, Law]:
    p = markov_law(1, vocab_size)
    if kind == "disjoint":
        return disjoint(p)
    return {
        "unrelated": (p, markov_law(2, vocab_size)),
        "equal": (p, p),
        "near": (p, nearly(p, 1e-9)),
        "zeros": (markov_law(3, vocab_size, 0.4), markov_law(4, vocab_size, 0.4)),
        "peaky draft": (p, peaky(vocab_size)),
        "peaky target": (peaky(vocab_size), p),
    }[kind]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [2, 3, 4])
@pytest.mark.parametrize(
    "kind", ["unrelated", "equal", "near", "disjoint", "zeros", "peaky draft", "peaky target"]
)
def test_the_output_law_is_the_targets(kind: str, vocab_size: int, num_draft_tokens: int) -> None:
    p, q = pair_of(kind, vocab_size)
    # One token beyond a round, so that the next round is joined on as well; less
    # far for the largest, to keep the tree small.
    length = min(num_draft_tokens + 2, 3 if vocab_size == 4 else 4)
    law = enumerate_output(p, q, num_draft_tokens, length)
    expected = enumerate_target(p, vocab_size, length)
    assert abs(sum(law.values()) - 1.0) < 1e-12
    assert max(abs(law.get(output, 0.0) - share) for output, share in expected.items()) < 1e-12


def test_the_enumeration_sees_a_wrong_residual() -> None:
    p, q = pair_of("unrelated", 3)
    first = enumerate_output(p, q, 1, 1)
    target, draft = p(()), q(())
    accept = (accept_probs(target, draft) * draft).sum()
    from_p = torch.minimum(target, draft) + (1 - accept) * target
    assert max(abs(first[(i,)] - float(from_p[i])) for i in range(3)) > 0.01


# By counting.


def skewed(vocab_size: int, sharpness: float) -> np.ndarray:
    weights = np.exp(-sharpness * np.arange(vocab_size))
    return (weights / weights.sum()).astype(np.float64)


def draw_chains(q: np.ndarray, num_chains: int, gamma: int, first_seed: int = 0) -> list[Chain]:
    """Chains whose tokens are drawn from q as a drafter draws them."""
    distribution = dense(q)
    chains = []
    for seed in range(first_seed, first_seed + num_chains):
        keys = derive_keys(seed, 0)
        drafts = tuple(
            draw_from_distribution(distribution, uniform_prob(keys.propose, 10 + j))
            for j in range(gamma)
        )
        chains.append(
            Chain(
                draft_token_ids=drafts,
                draft_probs=(distribution,) * gamma,
                params=SAMPLED,
                keys=keys,
                base_length=10,
            )
        )
    return chains


def test_counts_of_many_chains() -> None:
    """120k tokens: V = 8, γ = 4, a skewed q; also the mean tokens a round."""
    gamma, num_chains = 4, 40_000
    p, q = skewed(8, 0.3), skewed(8, 0.9)
    chains = draw_chains(q, num_chains, gamma)
    logits = logits_of(p).expand(1_000 * (gamma + 1), -1)
    outcomes: list[ChainOutcome] = []
    for start in range(0, num_chains, 1_000):
        outcomes += verify_chains(logits, chains[start : start + 1_000])
    tokens = np.concatenate([outcome.output_token_ids for outcome in outcomes])
    assert len(tokens) > 100_000
    first = np.array([outcome.output_token_ids[0] for outcome in outcomes])
    bounds = ((tokens, 0.01), (first, 0.015))
    for drawn, bound in bounds:
        counts = np.bincount(drawn, minlength=8)
        assert np.abs(counts / counts.sum() - p).sum() / 2 < bound
    alpha = np.minimum(p, q).sum()
    mean = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    lengths = np.array([len(outcome.output_token_ids) for outcome in outcomes])
    assert abs(lengths.mean() - mean) < 4 * lengths.std() / num_chains**0.5
    assert all(o.num_accepted_tokens == len(o.output_token_ids) - 1 for o in outcomes)


def test_p_and_q_equal_up_to_rounding() -> None:
    """No NaN, nothing impossible drawn, and nearly everything accepted (case A10)."""
    p = np.array([0.5, 0.3, 0.2 - 1e-8, 1e-8])
    q = p * (1 + 1e-7 * np.array([1, -1, 1, -1]))
    chains = draw_chains(q / q.sum(), 5_000, 4)
    logits = logits_of(p).expand(5_000 * 5, -1)
    outcomes = verify_chains(logits, chains)
    tokens = np.concatenate([outcome.output_token_ids for outcome in outcomes])
    assert (tokens < 3).all()
    assert np.mean([outcome.num_accepted_tokens for outcome in outcomes]) > 3.999


def test_a_residual_of_zero_falls_back_to_p() -> None:
    p = torch.tensor([[0.7, 0.3, 0.0]])
    assert torch.equal(residual_probs(p, p), p)
    # Every entry of q rounded up: p < q everywhere, and still a law to draw from.
    assert torch.equal(residual_probs(p, p * (1 + 1e-6)), p)
    # The other rows keep their residual.
    both = residual_probs(torch.cat([p, p]), torch.cat([p, torch.tensor([[1.0, 0.0, 0.0]])]))
    torch.testing.assert_close(both[1], torch.tensor([0.0, 0.3, 0.0]))


def test_acceptance_is_the_overlap_for_an_unrelated_draft() -> None:
    """Accepting everything, or a constant uniform, is far off (case A11)."""
    p, q = skewed(8, 0.5), skewed(8, 0.5)[::-1]
    num_chains = 20_000
    outcomes = verify_chains(
        logits_of(p).expand(num_chains * 2, -1), draw_chains(np.array(q), num_chains, 1)
    )
    alpha = np.minimum(p, q).sum()
    accepted = np.mean([outcome.num_accepted_tokens for outcome in outcomes])
    assert abs(accepted - alpha) < 4 * (alpha * (1 - alpha) / num_chains) ** 0.5


def test_tiny_probabilities_keep_their_ratio() -> None:
    """P = 1e-9 against q = 1e-8 is accepted one time in ten (case A56)."""
    num_chains = 20_000
    q = dense([1.0 - 1e-8, 1e-8])
    chains = [chain([1], [q], seed=seed) for seed in range(num_chains)]
    outcomes = verify_chains(logits_of([1.0 - 1e-9, 1e-9]).expand(num_chains * 2, -1), chains)
    accepted = np.mean([outcome.num_accepted_tokens for outcome in outcomes])
    assert abs(accepted - 0.1) < 0.02


def test_a_token_the_target_cannot_emit_is_never_accepted() -> None:
    """U may be 0, and 0 < 0 is false."""
    assert accept_probs(torch.tensor([0.0]), torch.tensor([1e-30])).item() == 0.0
    q = dense([0.5, 0.5, 0.0])
    chains = [chain([0], [q], seed=seed) for seed in range(2_000)]
    for outcome in verify_chains(one_hot(2, 2, vocab_size=3).repeat(2_000, 1), chains):
        assert outcome == ChainOutcome((2,), 0)


def test_every_position_has_a_uniform_of_its_own() -> None:
    """Whether one draft is accepted says nothing about the next."""
    num_chains = 10_000
    q = dense([0.5, 0.5])
    target = logits_of([0.25, 0.75], [0.25, 0.75], [0.25, 0.75])
    chains = [chain([0, 0], [q, q], seed=seed) for seed in range(num_chains)]
    outcomes = verify_chains(target.repeat(num_chains, 1), chains)
    counts = np.bincount([outcome.num_accepted_tokens for outcome in outcomes], minlength=3)
    assert np.abs(counts / num_chains - [0.5, 0.25, 0.25]).max() < 0.025


# The redraw check.


def drawn_chain(seed: int, gamma: int = 3, vocab_size: int = 12) -> Chain:
    rng = np.random.default_rng(seed)
    keys = derive_keys(seed, 0)
    qs = [dense(rng.dirichlet(np.full(vocab_size, 0.5))) for _ in range(gamma)]
    drafts = [
        draw_from_distribution(q, uniform_prob(keys.propose, 10 + j)) for j, q in enumerate(qs)
    ]
    return chain(drafts, qs, seed=seed)


def tampered(original: Chain, token_ids: Sequence[int], qs: Sequence[DraftDistribution]) -> Chain:
    return Chain(
        draft_token_ids=tuple(token_ids),
        draft_probs=tuple(qs),
        params=original.params,
        keys=original.keys,
        base_length=original.base_length,
    )


def count_caught(tamper: Callable[[Chain], Chain], num_chains: int = 300) -> int:
    return sum(not is_redrawn(tamper(drawn_chain(seed))) for seed in range(num_chains))


def test_honest_chains_pass_the_redraw_check() -> None:
    assert count_caught(lambda honest: honest) == 0


def test_a_prefix_passes_the_redraw_check() -> None:
    """A proposal may end early: at a deadline, say."""
    assert count_caught(lambda c: tampered(c, c.draft_token_ids[:2], c.draft_probs[:2])) == 0


def truncate(c: Chain) -> Chain:
    kept = [np.where(q.probs >= np.sort(q.probs)[-2], q.probs, 0.0) for q in c.draft_probs]
    return tampered(c, c.draft_token_ids, [dense(probs / probs.sum()) for probs in kept])


def test_truncation_after_sampling_is_caught() -> None:
    assert count_caught(truncate) > 200


def test_a_redrawn_chain_ends_with_the_first_token_that_is_replaced() -> None:
    for seed in range(300):
        honest = drawn_chain(seed)
        assert redraw(honest) == honest
        sent = truncate(honest)
        redrawn = redraw(sent)
        assert is_redrawn(redrawn)
        length = len(redrawn.draft_token_ids)
        assert redrawn.draft_probs == sent.draft_probs[:length]
        assert redrawn.draft_token_ids[:-1] == sent.draft_token_ids[: length - 1]
        if redrawn.draft_token_ids[-1] == sent.draft_token_ids[length - 1]:
            assert length == 3


def test_a_redrawn_chain_gives_the_targets_law() -> None:
    """Whatever the drafter did after the draw; dropping what differs would not."""
    num_chains = 20_000
    p, q = [0.55, 0.35, 0.06, 0.04], [0.45, 0.30, 0.15, 0.10]
    sent = [truncate(c) for c in draw_chains(np.array(q), num_chains, 1)]

    def law(chains: list[Chain]) -> np.ndarray:
        rows = sum(c.num_rows for c in chains)
        outcomes = verify_chains(logits_of(p).expand(rows, -1), chains)
        first = [outcome.output_token_ids[0] for outcome in outcomes]
        return np.bincount(first, minlength=4) / num_chains

    assert np.abs(law([redraw(c) for c in sent]) - p).max() < 0.02
    set_aside = [c if is_redrawn(c) else tampered(c, (), ()) for c in sent]
    assert np.abs(law(set_aside) - p).max() > 0.05


def test_rounding_after_sampling_is_caught() -> None:
    def round_q(c: Chain) -> Chain:
        rounded = [np.maximum(np.round(q.probs, 1), 1e-3) for q in c.draft_probs]
        return tampered(c, c.draft_token_ids, [dense(probs / probs.sum()) for probs in rounded])

    assert count_caught(round_q) > 30


def test_a_changed_token_is_caught() -> None:
    def change(c: Chain) -> Chain:
        first, *rest = c.draft_token_ids
        return tampered(c, [(first + 1) % 12, *rest], c.draft_probs)

    assert count_caught(change) == 300


def test_a_dropped_token_is_caught() -> None:
    assert count_caught(lambda c: tampered(c, c.draft_token_ids[1:], c.draft_probs[1:])) > 200


def test_a_token_without_mass_is_caught() -> None:
    q = dense([1.0, 0.0])
    assert not is_redrawn(chain([1], [q]))


# Logits that are not finite.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [SAMPLED, GREEDY])
def test_a_broken_row_ends_its_own_chain_only(value: float, params: SamplingParams) -> None:
    chains = draw_chains(skewed(8, 0.5), 5, 2)
    chains = [
        chain(c.draft_token_ids, c.draft_probs, params, seed) for seed, c in enumerate(chains)
    ]
    logits = torch.randn(15, 8, generator=torch.Generator().manual_seed(0))
    clean = verify_chains(logits, chains)
    broken = logits.clone()
    broken[7, 3] = value  # chain 2, its second row
    outcomes = verify_chains(broken, chains)
    assert outcomes[2] == ChainOutcome((), 0, is_finite=False)
    assert outcomes[:2] + outcomes[3:] == clean[:2] + clean[3:]
    assert broken[7, 3] != 0.0  # the caller's tensor is left alone


def test_uniforms_are_those_of_the_accept_key() -> None:
    """A draft is accepted iff its own uniform is below p / q."""
    q = dense([0.5, 0.5])
    chains = [chain([0], [q], seed=seed) for seed in range(1_000)]
    outcomes = verify_chains(logits_of([0.2, 0.8], [0.5, 0.5]).repeat(1_000, 1), chains)
    uniforms = uniform_probs([c.keys.accept for c in chains], [10] * 1_000)
    expected = (uniforms < 0.4).tolist()
    assert [outcome.num_accepted_tokens == 1 for outcome in outcomes] == expected
