"""From output tokens to delivered text, and where a generation ends.

Tokens are walked one at a time through `OutputStream.push`; the first terminal
event wins, and nothing after it is delivered. If one token both stops and
reaches the length limit, it stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from specdec.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended."""

    reason: FinishReason
    stop: str | None = None
    """The stop string found."""
    stop_token_id: int | None = None
    """The EOS or stop id emitted."""


class OutputStream:
    """One choice's text as its tokens come in.

    Text that may still become a stop string, and bytes that do not make a
    character yet, are held back. Bytes that never become one are not
    delivered: the text has no broken character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        eos_token_ids: tuple[int, ...],
        max_tokens: int,
    ) -> None:
        """Starts with no output.

        Args:
            tokenizer: Decodes.
            params: The stop rules.
            eos_token_ids: The model's EOS ids.
            max_tokens: Tokens after which the choice ends, at least 1.
        """
        self._decoder = _Decoder(tokenizer)
        self._stop = params.stop
        self.stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_token_ids |= frozenset(eos_token_ids)
        self._num_tokens_left = max_tokens
        self._num_tokens_until_stop = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._held = ""

    @property
    def num_tokens_left(self) -> int:
        """Tokens until the length limit."""
        return self._num_tokens_left

    def push(self, token_id: int) -> tuple[str, Finish | None]:
        """Takes the next token.

        Args:
            token_id: Its id.

        Returns:
            The text it releases, and why the choice ends with it, if it does.
        """
        self._num_tokens_left -= 1
        self._num_tokens_until_stop -= 1
        if token_id in self.stop_token_ids:
            return self._flush(), Finish(FinishReason.STOP, stop_token_id=token_id)
        self._held += self._decoder.push(token_id)
        # A stop string that was complete before min_tokens is text like any other.
        match = _first_match(self._held, self._stop) if self._num_tokens_until_stop < 0 else None
        if match is not None:
            start, stop = match
            end = start + len(stop) if self._includes_stop else start
            return self._held[:end], Finish(FinishReason.STOP, stop=stop)
        if self._num_tokens_left == 0:
            return self._flush(), Finish(FinishReason.LENGTH)
        num_released = len(self._held) - _num_held(self._held, self._stop)
        released, self._held = self._held[:num_released], self._held[num_released:]
        return released, None

    def _flush(self) -> str:
        released, self._held = self._held, ""
        return released


class _Decoder:
    """Decodes token by token; joined pieces equal the decoded ids, less broken characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        # The stream replaces bytes that other bytes have shown to be no character.
        return self._step(token_id).replace("\ufffd", "")

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # The stream gives up when bytes that can never be a character are
            # followed by others; start over with this token.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id) or ""


def _first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The stop string that is complete first; its start and itself."""
    matches = [(text.find(stop), stop) for stop in stops]
    found = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
    return min(found)[1:] if found else None


def _num_held(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
