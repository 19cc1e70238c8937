"""The data set on disk: conversations in shards, what was dropped, and a card.

    data.json                    the card: model, settings, counts
    shard-00000.jsonl            finished, never written again
    shard-00001.jsonl.partial    grows by a line per conversation
    dropped.jsonl                index and reason of each prompt dropped

A line is written when its conversation ends, so that a kill costs only what is
being decoded. Lines are in no order; `index` says which conversation each is.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Self

import orjson

from specdec.models.loading import file_digest
from training.journal import Journal, read_lines, sync_folder, write_atomically

CARD = "data.json"
DROPPED = "dropped.jsonl"
PARTIAL = ".partial"
SHARD_SIZE = 1000
"""Conversations per shard: some megabytes."""


class DatasetError(ValueError):
    """A folder holds other data, or is in use."""


class DropReason(Enum):
    """Why a prompt is not in the data set."""

    EMPTY = "empty"
    TOO_LONG = "too_long"
    """It reached the limit before its end, or leaves no room for an answer."""
    CONTROL_TOKEN = "control_token"
    """Its author wrote a control token that does not end a turn."""
    EXCLUDED = "excluded"
    """It is one of the prompts to keep out."""
    DUPLICATE = "duplicate"
    """It equals the prompt of a conversation with a lower index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt and its answer. The ids are what counts; the texts are for people."""

    index: int
    """Which conversation of its seed."""
    seed: int
    prompt: str
    """The user's words."""
    answer: str
    prompt_ids: tuple[int, ...]
    """The prompt through the chat template, up to where the answer begins."""
    answer_ids: tuple[int, ...]
    """The answer, with the token that ended it."""
    greedy: bool
    """Whether each token of the answer is the likeliest; else it is drawn."""
    finish_reason: str
    """Of the answer: stop, or length when it was cut."""


def read_conversations(folder: Path) -> Iterator[Conversation]:
    """Reads the finished shards of a data set.

    Args:
        folder: The data set's.

    Yields:
        The conversations, shard by shard, in no order within one.
    """
    for shard in _shards(folder):
        for entry in read_lines(shard):
            yield _conversation(entry)


class Dataset:
    """A data set being written, by this process alone.

    Attributes:
        prompts: The prompts of all conversations.
        indices: Indices that need not be written again: of conversations and of drops.
        num_dropped: By reason.
    """

    _shard: Journal | None
    """The one that grows; None before its first conversation."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        shard_size: int = SHARD_SIZE,
    ) -> None:
        """Begins a data set, or goes on with one.

        Args:
            folder: Where it is; made if missing.
            identity: For the card: what the content depends on; JSON values.
            facts: For the card: what else is to be known; JSON values.
            shard_size: Conversations per shard.

        Raises:
            DatasetError: If another process writes there, or the folder holds
                shards without a card, or a data set of another identity.
        """
        self._folder = folder
        self._identity = orjson.loads(orjson.dumps(dict(identity)))
        self._facts = facts
        self._shard_size = shard_size
        folder.mkdir(parents=True, exist_ok=True)
        # The kernel drops the lock when its holder dies.
        self._lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DatasetError(f"{folder}: another process is writing there") from None
        try:
            self._earlier = self._read_card()
            self._recover()
            self._write_card(is_complete=False, num_decoded_tokens=0, decoding_s=0.0)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it, if that has not been done."""
        self.close()

    @property
    def num_conversations(self) -> int:
        """Conversations written."""
        return len(self.prompts)

    def add(self, conversation: Conversation) -> None:
        """Writes a conversation; its index and its prompt are new."""
        entry = asdict(conversation)
        self._count(entry)
        if self._shard is None:
            self._shard = self._open_shard()
        self._shard.append(entry)
        if self._shard.num_lines == self._shard_size:
            self._seal()

    def drop(self, index: int, reason: DropReason) -> None:
        """Notes that the prompt of an index is not wanted."""
        self.indices.add(index)
        self.num_dropped[reason] += 1
        self._dropped.append({"index": index, "reason": reason.value})

    def close(
        self, *, is_complete: bool = False, num_decoded_tokens: int = 0, decoding_s: float = 0.0
    ) -> None:
        """Ends the shard that grows, writes the card, and lets other processes write.

        Args:
            is_complete: Whether all that was asked for is there.
            num_decoded_tokens: Tokens decoded since the data set was opened, those
                of dropped prompts included.
            decoding_s: How long that took, in s.
        """
        if self._lock.closed:
            return
        self._seal()
        self._dropped.close()
        self._write_card(
            is_complete=is_complete, num_decoded_tokens=num_decoded_tokens, decoding_s=decoding_s
        )
        self._lock.close()

    def _write_card(self, *, is_complete: bool, num_decoded_tokens: int, decoding_s: float) -> None:
        num_tokens = self._earlier.get("num_decoded_tokens", 0) + num_decoded_tokens
        seconds = self._earlier.get("decoding_s", 0.0) + decoding_s
        card = {
            **self._facts,
            **self._identity,
            "is_complete": is_complete,
            "counts": {
                "prompts": len(self.indices),
                "conversations": self.num_conversations,
                "dropped": {reason.value: self.num_dropped[reason] for reason in DropReason},
                **self._sums,
            },
            "decoding": {
                "num_decoded_tokens": num_tokens,
                "decoding_s": round(seconds, 3),
                "tokens_per_second": round(num_tokens / seconds, 1) if seconds else 0.0,
            },
            "shards": [
                {"file": shard.name, "sha256": file_digest(shard)}
                for shard in _shards(self._folder)
            ],
        }
        write_atomically(
            self._folder / CARD,
            orjson.dumps(card, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),
        )

    # What was there.

    def _read_card(self) -> dict[str, Any]:
        """The decoding figures of earlier runs; empty for a new data set."""
        path = self._folder / CARD
        if not path.exists():
            others = [*_shards(self._folder), *self._folder.glob(f"shard-*{PARTIAL}")]
            if others:
                raise DatasetError(f"{self._folder}: {others[0].name} is there, but no {CARD}")
            return {}
        try:
            card = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise DatasetError(f"{path}: not a data set's card: {error}") from error
        for name, value in self._identity.items():
            if card.get(name) != value:
                raise DatasetError(
                    f"{self._folder} was written with {_difference(name, card.get(name), value)};"
                    " take another folder, or the same settings"
                )
        return dict(card.get("decoding", {}))

    def _recover(self) -> None:
        self.prompts: set[str] = set()
        self.indices: set[int] = set()
        self.num_dropped: Counter[DropReason] = Counter()
        self._sums = {"greedy": 0, "cut_answers": 0, "prompt_tokens": 0, "answer_tokens": 0}
        for shard in _shards(self._folder):
            for entry in read_lines(shard):
                self._count(entry)
        self._shard = None
        if list(self._folder.glob(f"shard-*{PARTIAL}")):
            self._shard = self._open_shard()
            for entry in self._shard.entries:
                self._count(entry)
        self._dropped = Journal(self._folder / DROPPED)
        for entry in self._dropped.entries:
            self.indices.add(entry["index"])
            self.num_dropped[DropReason(entry["reason"])] += 1

    def _count(self, entry: Mapping[str, Any]) -> None:
        if entry["index"] in self.indices or entry["prompt"] in self.prompts:
            raise DatasetError(f"{self._folder}: conversation {entry['index']} is there twice")
        self.indices.add(entry["index"])
        self.prompts.add(entry["prompt"])
        self._sums["greedy"] += entry["greedy"]
        self._sums["cut_answers"] += entry["finish_reason"] == "length"
        self._sums["prompt_tokens"] += len(entry["prompt_ids"])
        self._sums["answer_tokens"] += len(entry["answer_ids"])

    # Shards.

    def _open_shard(self) -> Journal:
        # The one that a kill has left has the same name.
        numbers = [int(shard.stem.removeprefix("shard-")) for shard in _shards(self._folder)]
        return Journal(self._folder / f"shard-{max(numbers, default=-1) + 1:05}.jsonl{PARTIAL}")

    def _seal(self) -> None:
        """Gives the shard that grows its final name; an empty one goes."""
        if self._shard is None:
            return
        shard, self._shard = self._shard, None
        shard.close()
        if shard.num_lines:
            shard.path.rename(shard.path.with_name(shard.path.name.removesuffix(PARTIAL)))
        else:
            shard.path.unlink()
        sync_folder(self._folder)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.jsonl"))


def _conversation(entry: Mapping[str, Any]) -> Conversation:
    values = {field.name: entry[field.name] for field in fields(Conversation)}
    for name in ("prompt_ids", "answer_ids"):
        values[name] = tuple(values[name])
    return Conversation(**values)


def _difference(name: str, before: object, now: object) -> str:
    """Says what differs, down to the one setting."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return _difference(f"{name}.{key}", before.get(key), now.get(key))
    return f"{name} {before!r}, not {now!r}"
