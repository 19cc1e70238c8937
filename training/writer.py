"""From indices to conversations: the model writes a prompt, then its answer.

A conversation depends on the seed and its index alone: both texts have subkeys
of their own, and whether a prompt is kept is decided in the order of indices,
whatever order they are finished in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from orchestrator.tokenization import ChatMessage, Tokenization
from specdec.paged.loading import LoadedModel
from specdec.randomness import derive_keys, uniform_prob
from specdec.types import FinishReason, SamplingParams
from training.batch import Batch, Continuation
from training.chat_turns import ChatTurns
from training.dataset import Conversation, Dataset, DropReason
from training.prompts import PromptSet, normalise
from training.settings import WriteSettings

# Far beyond what a model that writes prompts ever needs: one that repeats itself, or
# never ends a turn, would go on for ever.
_MOST_DROPS_IN_A_ROW = 1000


class WriterError(RuntimeError):
    """The model does not write prompts that can be kept."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A prompt that is finished, and not kept yet."""

    text: str
    fault: DropReason | None = None


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt that is kept, with its ids through the template."""

    index: int
    text: str
    token_ids: list[int]


class Writer:
    """Lets the model write until there are enough conversations.

    Sequence 2 i writes prompt i, sequence 2 i + 1 its answer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenization: Tokenization,
        turns: ChatTurns,
        dataset: Dataset,
        settings: WriteSettings,
        *,
        prompts: Sequence[str] | None = None,
        excluded: Sequence[PromptSet] = (),
    ) -> None:
        """Starts with what the data set holds.

        Args:
            loaded: The model over its pool.
            tokenization: The model's.
            turns: The model's.
            dataset: Where conversations go.
            settings: What to write.
            prompts: What to answer; None lets the model write them.
            excluded: Prompts to keep out.

        Raises:
            ChatTurnsError: If the model has to write prompts and nothing would end
                one, or the context has no room for one.
        """
        if prompts is None:
            turns.check_usable(loaded.eos_token_ids, loaded.context_size)
        self.batch = Batch(loaded, tokenization.tokenizer, settings.batch_size)
        self._tokenization = tokenization
        self._context_size = loaded.context_size
        self._dataset = dataset
        self._settings = settings
        self._prompts = prompts
        self._turns = turns
        self._excluded = frozenset[str]().union(*(each.prompts for each in excluded))
        self._user_end_ids = turns.user_end_ids | frozenset(loaded.eos_token_ids)
        indices = count() if prompts is None else iter(range(len(prompts)))
        self._indices: Iterator[int] = (i for i in indices if i not in dataset.indices)
        self._next_index = next(self._indices, None)
        self._num_wanted = settings.num_conversations
        self._drafts: dict[int, _Draft | None] = {}
        """Prompts not decided yet, in the order of indices; None: being written."""
        self._questions: deque[_Question] = deque()
        """Prompts that wait for room to be answered."""
        self._asked: dict[int, _Question] = {}
        """By index: prompts being answered."""
        self._kept = set(dataset.prompts)
        self._num_drops_in_a_row = 0

    @property
    def is_done(self) -> bool:
        """Whether the data set holds what was asked for, or there are no more prompts."""
        return not (self._asked or self._questions or self._drafts or self._wants_prompt)

    @property
    def _wants_prompt(self) -> bool:
        """Whether another prompt is needed, even if all that are on their way are kept."""
        if self._next_index is None:
            return False
        return self._num_wanted is None or len(self._kept) + len(self._drafts) < self._num_wanted

    def step(self) -> None:
        """Starts what there is room for, and computes one step.

        Raises:
            BatchError: If the model could not compute a sequence.
            WriterError: If none of very many prompts could be kept.
        """
        self._fill()
        for continuation in self.batch.step():
            index, is_answer = divmod(continuation.sequence_id, 2)
            if is_answer:
                self._write(self._asked.pop(index), continuation)
            else:
                self._drafts[index] = self._read(continuation)
        self._decide()

    def _fill(self) -> None:
        # Answers first: prompts must not pile up.
        while self.batch.has_room:
            if self._questions:
                self._start_answer(self._questions.popleft())
            elif self._wants_prompt:
                assert self._next_index is not None
                self._start_prompt(self._next_index)
                self._next_index = next(self._indices, None)
            else:
                break

    # Prompts.

    def _start_prompt(self, index: int) -> None:
        if self._prompts is not None:
            self._drafts[index] = self._take(self._prompts[index])
            self._decide()
            return
        turns, settings = self._turns, self._settings
        params = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=(turns.user_end_text,) if turns.user_end_text else (),
            stop_token_ids=tuple(self._user_end_ids | turns.control_ids),
        )
        opening = turns.user_opening_ids
        self._drafts[index] = None
        self.batch.start(
            2 * index,
            opening,
            params,
            derive_keys(settings.seed, choice=2 * index),
            # One more than the words may have, for the token that ends them.
            max_tokens=min(settings.max_prompt_tokens + 1, self._context_size - len(opening)),
        )

    def _read(self, continuation: Continuation) -> _Draft:
        """What a sequence wrote in the user's place."""
        finish, fault = continuation.finish, None
        if finish.reason is FinishReason.LENGTH:
            fault = DropReason.TOO_LONG
        elif finish.stop_token_id is not None and finish.stop_token_id not in self._user_end_ids:
            fault = DropReason.CONTROL_TOKEN
        return _Draft(continuation.text.strip(), fault)

    def _take(self, text: str) -> _Draft:
        """A prompt of the file."""
        encoding = self._tokenization.tokenizer.encode(text, add_special_tokens=False)
        is_long = len(encoding.ids) > self._settings.max_prompt_tokens
        return _Draft(text.strip(), DropReason.TOO_LONG if is_long else None)

    def _decide(self) -> None:
        """Keeps or drops finished prompts, as long as none before them is being written."""
        while self._drafts:
            index, draft = next(iter(self._drafts.items()))
            if draft is None:
                return
            del self._drafts[index]
            fault = draft.fault or self._find_fault(draft.text)
            if fault is None:
                question = _Question(index, draft.text, self._encode(draft.text))
                if len(question.token_ids) < self._context_size:
                    self._keep(question)
                    continue
                fault = DropReason.TOO_LONG
            self._dataset.drop(index, fault)
            self._num_drops_in_a_row += 1
            if self._prompts is None and self._num_drops_in_a_row == _MOST_DROPS_IN_A_ROW:
                raise WriterError(
                    f"the last {_MOST_DROPS_IN_A_ROW} prompts were all dropped, the last one"
                    f" as {fault.value}: the model has no more to write at these settings"
                )

    def _find_fault(self, text: str) -> DropReason | None:
        if not text:
            return DropReason.EMPTY
        if normalise(text) in self._excluded:
            return DropReason.EXCLUDED
        return DropReason.DUPLICATE if text in self._kept else None

    def _encode(self, text: str) -> list[int]:
        """The ids a service would give the model for this prompt, not those it was written as."""
        return self._tokenization.encode_conversation([ChatMessage("user", text)])

    def _keep(self, question: _Question) -> None:
        self._kept.add(question.text)
        self._questions.append(question)
        self._num_drops_in_a_row = 0

    # Answers.

    def _start_answer(self, question: _Question) -> None:
        settings = self._settings
        is_greedy = self._is_greedy(question.index)
        params = SamplingParams(
            temperature=0.0 if is_greedy else settings.temperature,
            top_p=1.0 if is_greedy else settings.top_p,
            stop_token_ids=tuple(self._turns.answer_end_ids),
        )
        sequence_id = 2 * question.index + 1
        room = self._context_size - len(question.token_ids)
        self._asked[question.index] = question
        self.batch.start(
            sequence_id,
            question.token_ids,
            params,
            derive_keys(settings.seed, choice=sequence_id),
            max_tokens=min(settings.max_answer_tokens, room),
        )

    def _is_greedy(self, index: int) -> bool:
        if self._settings.temperature == 0.0:
            return True
        # Plain decoding accepts nothing, so that this subkey decides nothing else.
        key = derive_keys(self._settings.seed, choice=2 * index).accept
        return uniform_prob(key, 0) < self._settings.greedy_share

    def _write(self, question: _Question, continuation: Continuation) -> None:
        self._dataset.add(
            Conversation(
                index=question.index,
                seed=self._settings.seed,
                prompt=question.text,
                answer=continuation.text,
                prompt_ids=tuple(question.token_ids),
                answer_ids=continuation.token_ids,
                greedy=self._is_greedy(question.index),
                finish_reason=continuation.finish.reason.value,
            )
        )
