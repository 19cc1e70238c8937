"""The draft model's contract: what is sent is what was sampled from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.drafter import DraftSequence, OpenCommand, ProposeItem, Status
from draft_service.model_drafter import ModelDrafter
from specdec.paged.attention import PackedSequence
from specdec.paged.loading import LoadedModel, load_paged_model
from specdec.randomness import derive_keys, uniform_prob
from specdec.sampling import draw_from_distribution, draw_tokens, probs_from_logits
from specdec.types import Acceptance, DraftDistribution, SamplingParams
from tests.toy_models import save_random_llama

VOCAB_SIZE = 64
CONTEXT_SIZE = 128
SAMPLED = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[(5 * i + n) % VOCAB_SIZE for i in range(n)] for n in (1, 3, 4, 5, 17, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharp head, so that q is far from flat."""
    return save_random_llama(
        tmp_path_factory.mktemp("draft"), head_scale=4.0, max_position_embeddings=CONTEXT_SIZE
    )


def load(folder: Path, dtype: str = "float32", num_blocks: int = 128) -> LoadedModel:
    return load_paged_model(
        str(folder),
        dtype=dtype,
        device="cpu",
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=8,
        report=lambda line: None,
    )


def make_drafter(
    folder: Path,
    dtype: str = "float32",
    num_blocks: int = 128,
    sparse_support: int = 10,
    max_prefill_tokens: int = 8,
) -> ModelDrafter:
    return ModelDrafter(
        load(folder, dtype, num_blocks),
        max_prefill_tokens=max_prefill_tokens,
        sparse_support=sparse_support,
    )


@pytest.fixture
def drafter(folder: Path) -> Iterable[ModelDrafter]:
    drafter = make_drafter(folder)
    yield drafter
    drafter.check_integrity()


def open_sequence(
    drafter: ModelDrafter,
    token_ids: list[int],
    *,
    seed: int = 1,
    params: SamplingParams = SAMPLED,
    acceptance: Acceptance = Acceptance.REJECTION,
    is_dense: bool = False,
    num_tokens: int = 4,
) -> DraftSequence:
    keys = derive_keys(seed, 0)
    opening = OpenCommand(
        sequence_id=seed,
        epoch=1,
        token_ids=token_ids,
        drafter="model",
        params=params,
        acceptance=acceptance,
        key=keys.target if acceptance is Acceptance.COUPLED else keys.propose,
        is_dense=is_dense,
        stop_token_ids=frozenset(),
    )
    sequence = DraftSequence(1, opening, list(token_ids))
    drafter.open(sequence)
    ask(sequence, num_tokens)
    return sequence


def ask(sequence: DraftSequence, num_tokens: int) -> None:
    sequence.drafted.clear()
    sequence.item = ProposeItem(
        sequence_id=sequence.opening.sequence_id,
        epoch=1,
        round_index=0,
        base_length=len(sequence.token_ids),
        digest=b"",
        token_ids=[],
        num_speculative_tokens=num_tokens,
        deadline_s=None,
        traceparent="",
    )


def commit(
    drafter: ModelDrafter, sequence: DraftSequence, token_ids: list[int], num_tokens: int = 4
) -> None:
    """As the engine does it: tokens that follow those committed."""
    start = len(sequence.token_ids)
    drafter.commit(sequence, token_ids, start)
    sequence.token_ids[start:] = token_ids
    ask(sequence, num_tokens)


@dataclass
class Proposed:
    token_ids: list[int] = field(default_factory=list)
    draft_probs: list[DraftDistribution] = field(default_factory=list)
    status: Status = Status.OK
    num_steps: int = 0


def run(drafter: ModelDrafter, sequences: Sequence[DraftSequence]) -> list[Proposed]:
    """Steps until every proposal is final."""
    proposals = {id(sequence): Proposed() for sequence in sequences}
    for _ in range(200):
        waiting = [sequence for sequence in sequences if sequence.item is not None]
        if not waiting:
            break
        for drafted in drafter.step(waiting):
            proposal = proposals[id(drafted.sequence)]
            proposal.token_ids += drafted.token_ids
            proposal.draft_probs += drafted.draft_probs
            proposal.status = drafted.status
            drafted.sequence.drafted += drafted.token_ids
            if drafted.is_final:
                drafted.sequence.item = None
        for sequence in waiting:
            proposals[id(sequence)].num_steps += 1
        drafter.check_integrity()
    assert all(sequence.item is None for sequence in sequences)
    return list(proposals.values())


def prob_of(q: DraftDistribution, token_id: int) -> float:
    ids = np.arange(len(q.probs)) if q.token_ids is None else q.token_ids
    return float(q.probs[ids == token_id].sum())


# What is sent.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=3.0, top_k=3),
        SamplingParams(top_p=1e-9),
    ],
)
def test_the_draft_stream_contract(
    folder: Path, dtype: str, is_dense: bool, params: SamplingParams
) -> None:
    drafter = make_drafter(folder, dtype)
    sequences = [
        open_sequence(
            drafter, PROMPTS[seed % 6], seed=seed, params=params, is_dense=is_dense, num_tokens=6
        )
        for seed in range(8)
    ]
    for sequence, proposal in zip(sequences, run(drafter, sequences), strict=True):
        assert len(proposal.token_ids) == len(proposal.draft_probs) == 6
        for i, (token_id, q) in enumerate(
            zip(proposal.token_ids, proposal.draft_probs, strict=True)
        ):
            assert q.probs.dtype == np.float32
            assert abs(q.probs.sum(dtype=np.float64) - 1.0) < 1e-6
            assert (q.probs >= 0.0).all()
            assert prob_of(q, token_id) > 0.0
            position = len(sequence.token_ids) + i
            uniform = uniform_prob(sequence.opening.key, position)
            assert draw_from_distribution(q, uniform) == token_id
            if is_dense:
                assert q.token_ids is None
                assert len(q.probs) == VOCAB_SIZE
            else:
                assert q.token_ids is not None
                assert len(q.probs) <= 10
                assert (q.probs > 0.0).all()
                assert len(set(q.token_ids.tolist())) == len(q.token_ids)


def test_q_is_the_models_own_law(folder: Path, drafter: ModelDrafter) -> None:
    """At every position, given the tokens drafted before it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.8, top_k=20)
    for seed, prompt in enumerate(PROMPTS):
        sequence = open_sequence(drafter, prompt, seed=seed, params=params, is_dense=True)
        (proposal,) = run(drafter, [sequence])
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + proposal.token_ids])).logits[0].float()
        expected = probs_from_logits(logits[len(prompt) - 1 : -1], [params] * 4)
        for q, probs in zip(proposal.draft_probs, expected, strict=True):
            torch.testing.assert_close(torch.tensor(q.probs), probs, rtol=0, atol=1e-5)


def test_the_sparse_form_is_the_dense_one_cut_before_the_draw(folder: Path) -> None:
    drafter = make_drafter(folder, sparse_support=5)
    dense = open_sequence(drafter, PROMPTS[3], is_dense=True, num_tokens=1)
    sparse = open_sequence(drafter, PROMPTS[3], is_dense=False, num_tokens=1)
    (full,), (cut,) = (proposal.draft_probs for proposal in run(drafter, [dense, sparse]))
    order = np.argsort(-full.probs)[:5]
    assert cut.token_ids is not None
    assert cut.token_ids.tolist() == order.tolist()
    np.testing.assert_allclose(cut.probs, full.probs[order] / full.probs[order].sum(), rtol=1e-5)


def test_greedy_drafts_are_the_argmax_and_carry_no_q(folder: Path, drafter: ModelDrafter) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequence = open_sequence(drafter, PROMPTS[4], params=GREEDY, num_tokens=6)
    # Beside a sampled sequence as well as alone.
    for others in ([], [open_sequence(drafter, PROMPTS[2], seed=9, num_tokens=6)]):
        proposal = run(drafter, [sequence, *others])[0]
        assert proposal.draft_probs == []
        ids = list(PROMPTS[4])
        for token_id in proposal.token_ids:
            with torch.inference_mode():
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token_id
            ids.append(token_id)
        commit(drafter, sequence, [], 6)


def test_coupled_drafts_use_the_targets_noise_and_carry_no_q(drafter: ModelDrafter) -> None:
    options = {"seed": 5, "num_tokens": 6}
    coupled = open_sequence(drafter, PROMPTS[4], acceptance=Acceptance.COUPLED, **options)
    (proposal,) = run(drafter, [coupled])
    assert proposal.draft_probs == []
    assert len(proposal.token_ids) == 6
    key = derive_keys(5, 0).target
    # The law at each position, from the same tokens drafted one by one.
    for i, token_id in enumerate(proposal.token_ids):
        prefix = PROMPTS[4] + proposal.token_ids[:i]
        probe = open_sequence(drafter, prefix, is_dense=True, num_tokens=1)
        (q,) = run(drafter, [probe])[0].draft_probs
        drawn = draw_tokens(torch.tensor(q.probs)[None], [key], [len(prefix)])
        assert drawn.tolist() == [token_id]
        drafter.release(probe)


# Batches.


def test_a_batch_is_each_alone(folder: Path) -> None:
    kinds = [
        {},
        {"params": GREEDY},
        {"acceptance": Acceptance.COUPLED},
        {"is_dense": True, "params": SamplingParams(temperature=0.5)},
        {"params": SamplingParams(top_k=2)},
        {"params": SamplingParams(top_p=0.5), "num_tokens": 1},
    ]
    shared = make_drafter(folder)
    sequences = [
        open_sequence(shared, PROMPTS[i], seed=i, **kind)  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    ]
    together = run(shared, sequences)
    for i, kind in enumerate(kinds):
        own = make_drafter(folder)
        (alone,) = run(own, [open_sequence(own, PROMPTS[i], seed=i, **kind)])  # type: ignore[arg-type]
        assert together[i].token_ids == alone.token_ids
        assert len(together[i].draft_probs) == len(alone.draft_probs)
        for q, r in zip(together[i].draft_probs, alone.draft_probs, strict=True):
            np.testing.assert_allclose(q.probs, r.probs, rtol=0, atol=1e-5)


def test_a_step_adds_one_token_to_each_proposal(drafter: ModelDrafter) -> None:
    sequences = [open_sequence(drafter, PROMPTS[2], seed=seed) for seed in range(3)]
    # 12 prompt tokens at 8 a step, then a token a step.
    assert max(proposal.num_steps for proposal in run(drafter, sequences)) <= 6


def test_a_prompt_is_computed_ahead(drafter: ModelDrafter) -> None:
    sequence = open_sequence(drafter, PROMPTS[5])
    sequence.item = None
    while drafter.wants_step(sequence):
        assert drafter.step([sequence]) == []
    assert sequence.state.num_computed_tokens == len(PROMPTS[5]) - 1
    ask(sequence, 3)
    (proposal,) = run(drafter, [sequence])
    assert proposal.num_steps == 3


# Commits.


@pytest.mark.parametrize("num_accepted", range(5))
@pytest.mark.parametrize("is_bonus_a_draft", [False, True])
def test_after_a_commit_proposals_are_those_of_a_fresh_sequence(
    drafter: ModelDrafter, num_accepted: int, is_bonus_a_draft: bool
) -> None:
    sequence = open_sequence(drafter, PROMPTS[4])
    (first,) = run(drafter, [sequence])
    other = (first.token_ids[min(num_accepted, 3)] + 1) % VOCAB_SIZE
    emitted = first.token_ids[:num_accepted]
    if not (is_bonus_a_draft and emitted):
        emitted = [*emitted, other]
    commit(drafter, sequence, emitted)
    # The KV of accepted drafts is kept, that of the rest is not.
    num_kept = len(PROMPTS[4]) + min(num_accepted, 3, len(emitted) - 1)
    assert sequence.state.num_computed_tokens == num_kept
    (again,) = run(drafter, [sequence])
    fresh = open_sequence(drafter, PROMPTS[4] + emitted)
    (expected,) = run(drafter, [fresh])
    assert again.token_ids == expected.token_ids
    for q, r in zip(again.draft_probs, expected.draft_probs, strict=True):
        np.testing.assert_allclose(q.probs, r.probs, rtol=0, atol=1e-5)


def test_a_commit_may_go_back_and_change_the_past(drafter: ModelDrafter) -> None:
    sequence = open_sequence(drafter, PROMPTS[4])
    run(drafter, [sequence])
    changed = [1, 2, 3]
    drafter.commit(sequence, changed, 6)
    sequence.token_ids[6:] = changed
    ask(sequence, 4)
    (again,) = run(drafter, [sequence])
    (expected,) = run(drafter, [open_sequence(drafter, PROMPTS[4][:6] + changed)])
    assert again.token_ids == expected.token_ids


def test_many_rounds_and_a_release_give_every_block_back(drafter: ModelDrafter) -> None:
    rng = np.random.default_rng(0)
    sequences = [open_sequence(drafter, PROMPTS[i], seed=i) for i in range(4)]
    for _ in range(8):
        for sequence, proposal in zip(sequences, run(drafter, sequences), strict=True):
            accepted = proposal.token_ids[: rng.integers(0, 5)]
            commit(drafter, sequence, [*accepted, int(rng.integers(VOCAB_SIZE))])
    for sequence in sequences:
        drafter.release(sequence)
        drafter.release(sequence)
    drafter.check_integrity()
    assert drafter._pool.num_free == drafter._pool.num_blocks


# What goes wrong.


def test_the_end_of_the_context_ends_a_proposal(drafter: ModelDrafter) -> None:
    prompt = [i % VOCAB_SIZE for i in range(CONTEXT_SIZE - 2)]
    sequence = open_sequence(drafter, prompt, num_tokens=6)
    beside = open_sequence(drafter, PROMPTS[1], num_tokens=6)
    at_end, other = run(drafter, [sequence, beside])
    assert at_end.status is Status.OK
    assert len(at_end.token_ids) == 2
    assert len(other.token_ids) == 6


@pytest.mark.parametrize("params", [SAMPLED, GREEDY])
def test_a_row_that_is_not_finite_ends_that_proposal_only(
    folder: Path, drafter: ModelDrafter, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [open_sequence(drafter, PROMPTS[1], seed=i, params=params) for i in range(3)]
    forward = drafter._model.forward
    own = make_drafter(folder)
    expected = run(own, [open_sequence(own, PROMPTS[1], seed=i, params=params) for i in range(3)])

    def broken(packed: list, num_logits: list[int]) -> torch.Tensor:
        logits = forward(packed, num_logits).clone()
        tables = [part.block_table for part, count in zip(packed, num_logits, strict=True) if count]
        for row, table in zip(logits, tables, strict=True):
            if table is sequences[1].state.block_table:
                row[5] = torch.nan
        return logits

    monkeypatch.setattr(drafter._model, "forward", broken)
    proposals = run(drafter, sequences)
    assert [proposal.status for proposal in proposals] == [Status.OK, Status.FAILED, Status.OK]
    assert proposals[1].token_ids == []
    for i in (0, 2):
        assert proposals[i].token_ids == expected[i].token_ids
    # It is tried again afterwards, from nothing.
    monkeypatch.undo()
    commit(drafter, sequences[1], [])
    assert run(drafter, [sequences[1]])[0].token_ids == expected[1].token_ids


def test_a_poisoned_cache_is_cleared_before_others_get_it(
    folder: Path, drafter: ModelDrafter
) -> None:
    sequence = open_sequence(drafter, PROMPTS[4])
    run(drafter, [sequence])
    for tensor in (*drafter._model.kv._keys, *drafter._model.kv._values):
        tensor[sequence.state.block_table] = torch.nan
    commit(drafter, sequence, [])
    (failed,) = run(drafter, [sequence])
    assert failed.status is Status.FAILED
    fresh = open_sequence(drafter, PROMPTS[4], seed=3)
    own = make_drafter(folder)
    (expected,) = run(own, [open_sequence(own, PROMPTS[4], seed=3)])
    assert run(drafter, [fresh])[0].token_ids == expected.token_ids


def test_without_room_one_proposal_ends_and_the_others_go_on(folder: Path) -> None:
    drafter = make_drafter(folder, num_blocks=6, max_prefill_tokens=64)
    small = [open_sequence(drafter, PROMPTS[1], seed=i) for i in range(2)]
    large = open_sequence(drafter, PROMPTS[4], seed=2)  # 5 blocks
    proposals = run(drafter, [*small, large])
    assert [proposal.status for proposal in proposals] == [
        Status.OK,
        Status.OK,
        Status.EXHAUSTED,
    ]
    assert [len(proposal.token_ids) for proposal in proposals] == [4, 4, 0]
    # Once the others have gone there is room.
    for sequence in small:
        drafter.release(sequence)
    commit(drafter, large, [])
    assert len(run(drafter, [large])[0].token_ids) == 4
    drafter.check_integrity()


def test_sequences_that_draft_nothing_make_room(folder: Path) -> None:
    drafter = make_drafter(folder, num_blocks=6, max_prefill_tokens=64)
    idle = open_sequence(drafter, PROMPTS[4], seed=2)
    (first,) = run(drafter, [idle])
    (other,) = run(drafter, [open_sequence(drafter, PROMPTS[4], seed=3)])
    assert other.status is Status.OK
    assert len(other.token_ids) == 4
    # What was taken is computed again.
    commit(drafter, idle, [])
    assert run(drafter, [idle])[0].token_ids == first.token_ids
    drafter.check_integrity()


def test_a_prefix_computed_before_is_reused_and_drafts_stay_the_same(folder: Path) -> None:
    drafter, fresh = make_drafter(folder), make_drafter(folder)
    prompt = PROMPTS[5]  # 40 tokens: 10 blocks
    first = open_sequence(drafter, prompt)
    run(drafter, [first])
    drafter.release(first)
    num_rows = 0
    forward = drafter._model.forward

    def counting(packed: Sequence[PackedSequence], num_logits: Sequence[int]) -> torch.Tensor:
        nonlocal num_rows
        num_rows += sum(len(part.token_ids) for part in packed)
        return forward(packed, num_logits)

    drafter._model.forward = counting  # type: ignore[method-assign]
    (again,) = run(drafter, [open_sequence(drafter, prompt, seed=2)])
    (expected,) = run(fresh, [open_sequence(fresh, prompt, seed=2)])
    assert again.token_ids == expected.token_ids
    assert num_rows == len(again.token_ids)  # the last token of the prompt, and each draft but one
    num_rows = 0
    (longer,) = run(drafter, [open_sequence(drafter, [*prompt, 1, 2, 3], seed=3)])
    (expected,) = run(fresh, [open_sequence(fresh, [*prompt, 1, 2, 3], seed=3)])
    assert longer.token_ids == expected.token_ids
    assert num_rows == 3 + len(longer.token_ids) - 1
    drafter.check_integrity()
