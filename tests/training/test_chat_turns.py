from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from training.chat_turns import ChatTurns, ChatTurnsError

CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% for message in messages %}"
    "<|header|>{{ message.role }}<|/header|>\n\n{{ message.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "<s>[INST] {{ message.content }} [/INST]{% else %} {{ message.content }} </s>{% endif %}"
    "{% endfor %}"
)
BARE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>")
SPECIAL = (*SPECIAL, "<s>", "</s>")


def save_bytes(folder: Path, template: str | None) -> PreTrainedTokenizerFast:
    """Saves a tokenizer of bytes, and of the special tokens of all templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "opening", "user_end", "end_text", "answer_end"),
    [
        (
            CHATML,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
            ["<|im_end|>"],
            "",
            ["<|im_end|>"],
        ),
        (LLAMA3, "<|begin|><|header|>user<|/header|>\n\n", ["<|eot|>"], "", ["<|eot|>"]),
        # The space is the first word's; the words end in text, the answer in a token.
        (LLAMA2, "<s>[INST]", [], "[/INST]", ["</s>"]),
        (BARE, "user:", [], "", []),
    ],
    ids=["chatml", "llama3", "llama2", "bare"],
)
def test_a_template_is_cut_around_the_users_words(
    tmp_path: Path,
    template: str,
    opening: str,
    user_end: list[str],
    end_text: str,
    answer_end: list[str],
) -> None:
    tokenizer = save_bytes(tmp_path, template)
    turns = ChatTurns(tmp_path)
    assert turns.user_opening == opening
    assert tokenizer.decode(turns.user_opening_ids) == opening
    assert turns.user_end_ids == set(tokenizer.convert_tokens_to_ids(user_end))
    assert turns.user_end_text == end_text
    assert turns.answer_end_ids == set(tokenizer.convert_tokens_to_ids(answer_end))
    assert turns.control_ids == set(tokenizer.convert_tokens_to_ids(list(SPECIAL)))


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_opening_words_and_closing_make_the_whole_prompt(tmp_path: Path, template: str) -> None:
    tokenizer = save_bytes(tmp_path, template)
    turns = ChatTurns(tmp_path)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], add_generation_prompt=True
    )["input_ids"]
    words = tokenizer("Why?")["input_ids"]
    num_before = len(turns.user_opening_ids)
    assert whole[:num_before] == turns.user_opening_ids
    assert whole[num_before : num_before + len(words)] == words
    assert len(whole) == num_before + len(words) + turns.num_closing_tokens


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('only tools may speak') }}", "only tools may speak"),
        ("<s>{% for message in messages %}{{ message.role }}{% endfor %}", "does not show"),
        ("{{ messages[0].content }}</s>", "nothing before"),
    ],
)
def test_a_template_without_a_user_is_refused(
    tmp_path: Path, template: str | None, message: str
) -> None:
    save_bytes(tmp_path, template)
    with pytest.raises(ChatTurnsError, match=message):
        ChatTurns(tmp_path)


def test_prompts_need_an_end_and_room(tmp_path: Path) -> None:
    save_bytes(tmp_path, BARE)
    turns = ChatTurns(tmp_path)
    with pytest.raises(ChatTurnsError, match="nor an EOS id ends"):
        turns.check_usable((), context_size=100)
    turns.check_usable((5,), context_size=8)
    with pytest.raises(ChatTurnsError, match="no room in a context of 7"):
        turns.check_usable((5,), context_size=7)
