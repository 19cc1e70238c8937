r"""Where the turns of a chat template begin and end.

Rendered with a mark in place of the user's words, a template shows what
surrounds them:

    <|im_start|>user\n           MARK  <|im_end|>\n<|im_start|>assistant\n
    [----- opening -----]              [----------- closing -----------]

A model that is given the opening goes on with what a user would say, and ends
the turn as the closing begins (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import uuid
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from specdec.models.loading import load_tokenizer


class ChatTurnsError(ValueError):
    """A model has no chat template, or one without turns of a user."""


class ChatTurns:
    """How a user's turn is opened, and what ends a turn.

    Attributes:
        user_opening: Text up to where the user's words begin.
        user_opening_ids: Its ids.
        num_closing_tokens: Tokens from the end of the user's words to the answer.
        user_end_ids: Ids that end the user's turn.
        user_end_text: Text that ends it, in a template without such an id; else "".
        answer_end_ids: Ids that end the answer; the model's EOS ids do so too.
        control_ids: All special tokens; none of them belongs in a user's words.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the template of a model.

        Args:
            folder: The model's folder.

        Raises:
            ModelError: If it has no tokenizer.
            ChatTurnsError: If it has no template, or one without turns of a user.
        """
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        if self._tokenizer.chat_template is None:
            raise ChatTurnsError(f"{folder}: the model has no chat template to write prompts with")
        added = self._tokenizer.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.control_ids = frozenset(self._tokenizer.all_special_ids) | frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        user, answer = _mark(), _mark()
        opening, found, closing = self._render([("user", user)], is_answer_next=True).partition(
            user
        )
        if not found:
            raise ChatTurnsError(f"{folder}: the chat template does not show what a user says")
        # Tokenizers join a space to the word after it, which is the user's.
        self.user_opening = opening.rstrip(" ")
        self.user_opening_ids = self._encode(self.user_opening)
        if not self.user_opening_ids:
            raise ChatTurnsError(f"{folder}: the chat template puts nothing before a user's words")
        self.num_closing_tokens = len(self._encode(closing))
        self.user_end_ids, self.user_end_text = self._find_end(closing)
        shown = self._render([("user", user), ("assistant", answer)], is_answer_next=False)
        self.answer_end_ids, _ = self._find_end(shown.partition(answer)[2])

    def check_usable(self, eos_token_ids: tuple[int, ...], context_size: int) -> None:
        """Checks that a model can write prompts this way.

        Args:
            eos_token_ids: The model's.
            context_size: Most tokens of a text.

        Raises:
            ChatTurnsError: If nothing ends a prompt, or there is no room for one.
        """
        if not (self.user_end_ids or self.user_end_text or eos_token_ids):
            raise ChatTurnsError("neither the chat template nor an EOS id ends what a user says")
        num_tokens = len(self.user_opening_ids) + self.num_closing_tokens
        if num_tokens + 2 > context_size:
            raise ChatTurnsError(
                f"the chat template's {num_tokens} tokens leave no room in a context of"
                f" {context_size}"
            )

    def _render(self, messages: list[tuple[str, str]], *, is_answer_next: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tokenize=False,
                add_generation_prompt=is_answer_next,
            )
        except TemplateError as error:
            roles = ", ".join(role for role, _ in messages)
            raise ChatTurnsError(f"the chat template refuses turns of {roles}: {error}") from error
        return str(rendered)

    def _encode(self, text: str) -> list[int]:
        # The template has written its own special tokens, BOS included.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _find_end(self, closing: str) -> tuple[frozenset[int], str]:
        """The token that follows a turn's words, else the text up to the next such token."""
        closing = closing.lstrip()
        first = self._encode(closing)[:1]
        if self._added.keys() & first:
            return frozenset(first), ""
        starts = [closing.find(token) for token in self._added.values()]
        return frozenset(), closing[: min((i for i in starts if i >= 0), default=None)].strip()


def _mark() -> str:
    # Nothing a template writes or trims; each render needs one it has not seen.
    return f"\ue000{uuid.uuid4().hex}\ue001"
