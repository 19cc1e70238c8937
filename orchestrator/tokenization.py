"""From what a request asks to continue to token ids."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from specdec.errors import InvalidArgumentError
from specdec.models.loading import load_tokenizer, token_table_digest


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One chat message."""

    role: str
    content: str


class Tokenization:
    """The target's tokenizer and chat template.

    Attributes:
        tokenizer: The `tokenizers` object, for incremental decoding.
        token_table_digest: To be compared with the target's.
    """

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer of a model folder.

        Args:
            folder: The target's folder.

        Raises:
            ModelError: If there is none.
        """
        self._hf: PreTrainedTokenizerFast = load_tokenizer(folder)
        self.tokenizer: Tokenizer = self._hf.backend_tokenizer
        self.token_table_digest = token_table_digest(self._hf)
        self._special_ids = frozenset(self._hf.all_special_ids) | frozenset(
            token_id for token_id, token in self._hf.added_tokens_decoder.items() if token.special
        )

    def encode_prompt(self, prompt: str) -> list[int]:
        """Tokenises text with the tokenizer's own special-token policy.

        Args:
            prompt: Not empty; control strings in it are recognised.

        Returns:
            Its ids. A BOS that the text already spells is not added again.

        Raises:
            InvalidArgumentError: If the text is empty, or has no tokens.
        """
        if not prompt:
            raise InvalidArgumentError("prompt", "must not be empty")
        ids: list[int] = self._hf(prompt)["input_ids"]
        if not ids:
            raise InvalidArgumentError("prompt", f"has no tokens (got {len(prompt)} characters)")
        bos = self._hf.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and prompt.startswith(str(self._hf.bos_token)):
            return ids[1:]
        return ids

    def encode_conversation(self, messages: list[ChatMessage]) -> list[int]:
        """Puts messages through the chat template.

        Args:
            messages: Oldest first. Contents are text: a string in one that
                spells a control token stays text.

        Returns:
            The ids, generation prompt included.

        Raises:
            InvalidArgumentError: If there are no messages, the model has no
                template, or the template refuses them.
        """
        if not messages:
            raise InvalidArgumentError("conversation.messages", "must not be empty")
        if self._hf.chat_template is None:
            raise InvalidArgumentError("conversation", "this model has no chat template")
        for index, message in enumerate(messages):
            if self._spells_special(message.role):
                field = f"conversation.messages[{index}].role"
                raise InvalidArgumentError(field, f"is not a role (got {message.role!r})")
        if not any(self._spells_special(message.content) for message in messages):
            return self._encode(self._render(messages))
        return self._encode_escaped(messages)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Spells words as ids, the way they occur at a start and after a space.

        Args:
            words: None is empty or all space.

        Returns:
            One or two spellings of each.
        """
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self._encode(text, is_text=True))
                # A tokenizer may spell a space by itself: that is the word after another token.
                if ids:
                    spellings[ids] = None
        return tuple(spellings)

    def _encode_escaped(self, messages: list[ChatMessage]) -> list[int]:
        """Encodes template and contents apart, so that contents spell no control token."""
        marks = [f"\ue000{uuid.uuid4().hex}\ue001" for _ in messages]
        rendered = self._render(
            [ChatMessage(message.role, mark) for message, mark in zip(messages, marks, strict=True)]
        )
        ids: list[int] = []
        for mark, message in zip(marks, messages, strict=True):
            before, found, after = rendered.partition(mark)
            if found:
                ids += self._encode(before) + self._encode(message.content, is_text=True)
                rendered = after
        return ids + self._encode(rendered)

    def _render(self, messages: list[ChatMessage]) -> str:
        try:
            rendered = self._hf.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            description = f"the chat template refuses them: {error}"
            raise InvalidArgumentError("conversation.messages", description) from error
        return str(rendered)

    def _encode(self, text: str, *, is_text: bool = False) -> list[int]:
        # The template has written its own special tokens, BOS included.
        ids: list[int] = self._hf(text, add_special_tokens=False, split_special_tokens=is_text)[
            "input_ids"
        ]
        return ids

    def _spells_special(self, text: str) -> bool:
        return not self._special_ids.isdisjoint(self._encode(text))
