from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from training.dataset import Conversation, Dataset, DatasetError, DropReason, read_conversations

IDENTITY = {"fingerprint": "f", "settings": {"seed": 3, "top_p": 1.0}}


def conversation(index: int) -> Conversation:
    return Conversation(
        index=index,
        seed=3,
        prompt=f"prompt {index} – ü",
        answer="an answer",
        prompt_ids=(1, 2, index),
        answer_ids=(4, 5),
        greedy=index % 2 == 0,
        finish_reason="stop" if index else "length",
    )


def open_dataset(folder: Path, **identity: Any) -> Dataset:
    return Dataset(folder, {**IDENTITY, **identity}, {"model": "m"}, shard_size=2)


def read_card(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((folder / "data.json").read_bytes())
    return card


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with open_dataset(tmp_path) as dataset:
        for index in (2, 0, 3):
            dataset.add(conversation(index))
        dataset.drop(1, DropReason.EMPTY)
        assert [c.index for c in read_conversations(tmp_path)] == [2, 0]  # finished shards only
        assert not read_card(tmp_path)["is_complete"]
        dataset.close(is_complete=True, num_decoded_tokens=30, decoding_s=2.0)
    assert list(read_conversations(tmp_path)) == [conversation(i) for i in (2, 0, 3)]
    card = read_card(tmp_path)
    assert card["model"] == "m"
    assert card["is_complete"]
    assert card["counts"]["prompts"] == 4
    assert card["counts"]["conversations"] == 3
    assert card["counts"]["dropped"]["empty"] == 1
    assert (card["counts"]["greedy"], card["counts"]["cut_answers"]) == (2, 1)
    assert (card["counts"]["prompt_tokens"], card["counts"]["answer_tokens"]) == (9, 6)
    assert card["decoding"]["tokens_per_second"] == 15.0
    for shard in card["shards"]:
        content = (tmp_path / shard["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
    assert sorted(path.name for path in tmp_path.glob("shard*")) == [
        "shard-00000.jsonl",
        "shard-00001.jsonl",
    ]


def test_a_kill_costs_a_torn_line_at_most(tmp_path: Path) -> None:
    killed = open_dataset(tmp_path)
    for index in range(3):
        killed.add(conversation(index))
    killed.drop(3, DropReason.DUPLICATE)
    killed.drop(4, DropReason.DUPLICATE)
    killed._lock.close()  # as the kernel does it
    shard, dropped = tmp_path / "shard-00001.jsonl.partial", tmp_path / "dropped.jsonl"
    shard.write_bytes(shard.read_bytes() + b'{"index": 7, "prom')
    dropped.write_bytes(dropped.read_bytes()[:-1])
    with open_dataset(tmp_path) as dataset:
        assert dataset.indices == {0, 1, 2, 3}
        assert dataset.prompts == {conversation(i).prompt for i in range(3)}
        assert dataset.num_dropped == {DropReason.DUPLICATE: 1}
        dataset.add(conversation(5))
    assert list(read_conversations(tmp_path)) == [conversation(i) for i in (0, 1, 2, 5)]
    assert not list(tmp_path.glob("*.partial"))


def test_a_data_set_is_gone_on_with(tmp_path: Path) -> None:
    with open_dataset(tmp_path) as dataset:
        dataset.add(conversation(0))
        dataset.close(num_decoded_tokens=10, decoding_s=1.0)
    with open_dataset(tmp_path) as dataset:
        assert dataset.num_conversations == 1
        dataset.add(conversation(1))
        dataset.close(is_complete=True, num_decoded_tokens=20, decoding_s=1.0)
    assert [c.index for c in read_conversations(tmp_path)] == [0, 1]
    assert read_card(tmp_path)["decoding"]["tokens_per_second"] == 15.0
    assert len(read_card(tmp_path)["shards"]) == 2


def test_another_identity_is_refused(tmp_path: Path) -> None:
    open_dataset(tmp_path).close()
    with pytest.raises(DatasetError, match=r"settings\.top_p 1\.0, not 0\.5"):
        open_dataset(tmp_path, settings={"seed": 3, "top_p": 0.5})
    with pytest.raises(DatasetError, match="fingerprint 'f', not 'g'"):
        open_dataset(tmp_path, fingerprint="g")
    open_dataset(tmp_path).close()


def test_shards_without_a_card_are_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "shard-00004.jsonl").touch()
    with pytest.raises(DatasetError, match=r"shard-00004\.jsonl is there, but no data\.json"):
        open_dataset(tmp_path)


def test_two_processes_do_not_write_one_data_set(tmp_path: Path) -> None:
    with open_dataset(tmp_path), pytest.raises(DatasetError, match="another process"):
        open_dataset(tmp_path)
    open_dataset(tmp_path).close()


def test_a_conversation_is_there_once(tmp_path: Path) -> None:
    with open_dataset(tmp_path) as dataset:
        dataset.add(conversation(0))
    (tmp_path / "shard-00001.jsonl").write_bytes((tmp_path / "shard-00000.jsonl").read_bytes())
    with pytest.raises(DatasetError, match="conversation 0 is there twice"):
        open_dataset(tmp_path)
