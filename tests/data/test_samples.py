from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.data.conversations import Prompt
from eagle3_core.data.regenerate import Answer
from eagle3_core.data.samples import (
    Conversation,
    build_samples,
    read_conversations,
    tokens_and_mask,
    write_conversations,
)
from eagle3_core.data.template import ChatTemplate
from eagle3_core.errors import DataError
from eagle3_core.identity import STEP_VERSION
from eagle3_core.store.dataset import content_hash
from tests.tiny import CHATML, CHATML_GENERATION, tiny_tokenizer

pytestmark = pytest.mark.engine

END = 2


@pytest.fixture(scope="module", params=[CHATML, CHATML_GENERATION], ids=["plain", "tagged"])
def chat(request: pytest.FixtureRequest) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(500, request.param), [END], "tiny")


def _prompt(*turns: str, key: str = "k") -> Prompt:
    return Prompt(key=key, id=None, kind="code", split="heldout", system=None, turns=turns)


def _single(num_prompt: int, answer: list[int], reason: str = "stop", key: str = "k") -> Conversation:
    """A conversation of one turn with made-up ids."""
    return Conversation(
        _prompt("q", key=key), [Answer(key, 0, list(range(10, 10 + num_prompt)), answer, "text", reason)]
    )


def _two_turns(chat: ChatTemplate, first: list[int], reason: str) -> Conversation:
    """Two turns, of which the first was answered with the tokens `first`."""
    prompt = _prompt("q", "r")
    text = chat.decode_answer(first)
    second = chat.prompt_ids(prompt.messages([text]))
    return Conversation(
        prompt,
        [
            Answer("k", 0, chat.prompt_ids(prompt.messages([])), first, text, reason),
            Answer("k", 1, second, [40, 41, END], "..", "stop"),
        ],
    )


def _ids(chat: ChatTemplate, text: str) -> list[int]:
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_sample_is_the_prompt_and_the_generated_tokens(chat: ChatTemplate) -> None:
    made = build_samples([_single(3, [50, END])], chat, max_length=32, min_trainable_tokens=2)
    (sample,) = made.samples
    assert sample.input_ids.tolist() == [10, 11, 12, 50, END]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert (sample.key, sample.kind, sample.split, sample.prompt_length) == ("k", "code", "heldout", 3)
    assert sample.finish_reason == "stop"
    assert made.num_truncated == 0


def test_a_cut_answer_has_no_end_of_turn_and_is_counted(chat: ChatTemplate) -> None:
    made = build_samples([_single(3, [50, 51], "length")], chat, max_length=32, min_trainable_tokens=2)
    assert made.samples[0].loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert made.samples[0].finish_reason == "length"
    assert made.num_truncated == 1


def test_a_long_sample_is_cut_with_its_mask_and_a_long_prompt_rejected(chat: ChatTemplate) -> None:
    rows = [_single(20, [50] * 29 + [END], key="x"), _single(40, [50] * 9 + [END], key="y")]
    made = build_samples(rows, chat, max_length=32, min_trainable_tokens=2)
    (sample,) = made.samples
    assert (sample.key, len(sample.input_ids), len(sample.loss_mask)) == ("x", 32, 32)
    assert int(sample.loss_mask.sum()) == 12
    assert sample.finish_reason == "length"
    assert [(r.key, r.reason.split(":")[0]) for r in made.rejected] == [("y", "no trainable tokens")]
    assert made.num_truncated == 1


def test_answers_with_too_little_to_learn_from_are_rejected(chat: ChatTemplate) -> None:
    made = build_samples([_single(3, [END])], chat, max_length=32, min_trainable_tokens=2)
    assert made.samples == []
    assert made.rejected[0].reason.startswith("too few trainable tokens: 1 of")


@pytest.mark.parametrize("text", ["", " ", "\n\n", "   \n ", "\u3000"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_of_white_space_alone_is_rejected_in_any_turn(
    chat: ChatTemplate, text: str, reason: str
) -> None:
    tokens = _ids(chat, text) + [END] * (reason == "stop")
    whole = Answer("k", 0, [10, 11], [*_ids(chat, "ok"), END], "ok", "stop")
    empty = Answer("k", 0, [10, 11], tokens, chat.decode_answer(tokens), reason)
    assert empty.text == text
    rows = [
        Conversation(_prompt("q", key="only"), [empty]),
        Conversation(_prompt("q", "r", key="last"), [whole, empty]),
        _two_turns(chat, tokens, reason),
    ]
    made = build_samples(rows, chat, max_length=512, min_trainable_tokens=1)
    assert made.samples == []
    assert [(r.key, r.reason) for r in made.rejected] == [
        (key, f"empty answer: the target wrote no text in turn {turn}, or white space alone")
        for key, turn in (("only", 1), ("last", 2), ("k", 1))
    ]


def test_an_earlier_answer_is_trained_on_with_its_end_of_turn(chat: ChatTemplate) -> None:
    ids, mask, prompt_length, num_unmasked = tokens_and_mask(
        _two_turns(chat, [*_ids(chat, "The sea."), END], "stop"), chat
    )
    assert chat.tokenizer.decode(ids[:prompt_length][mask[:prompt_length] == 1]) == "The sea.<|im_end|>"
    assert mask[prompt_length:].tolist() == [1, 1, 1]
    assert ids[prompt_length:].tolist() == [40, 41, END]
    assert num_unmasked == 0


def test_the_end_of_turn_after_a_cut_earlier_answer_was_not_generated(chat: ChatTemplate) -> None:
    ids, mask, prompt_length, _ = tokens_and_mask(_two_turns(chat, _ids(chat, "The sea"), "length"), chat)
    assert chat.tokenizer.decode(ids[:prompt_length][mask[:prompt_length] == 1]) == "The sea"


def test_an_earlier_answer_of_other_tokens_than_were_generated_is_left_out_and_counted(
    chat: ChatTemplate,
) -> None:
    spelled = [token for letter in "The" for token in _ids(chat, letter)]
    assert spelled != _ids(chat, "The")
    conversation = _two_turns(chat, [*spelled, END], "stop")
    _, mask, prompt_length, num_unmasked = tokens_and_mask(conversation, chat)
    assert mask[:prompt_length].sum() == 0
    assert mask[prompt_length:].sum() == 3
    assert num_unmasked == 1
    assert build_samples([conversation], chat, 512, 2).num_unmasked_answers == 1


def test_a_prompt_that_is_not_what_the_engine_saw_is_rejected(chat: ChatTemplate) -> None:
    good = _two_turns(chat, [*_ids(chat, "ok"), END], "stop")
    last = good.answers[1]
    other = Answer("k", 1, [*last.prompt_ids, 77], last.token_ids, last.text, "stop")
    made = build_samples([Conversation(good.prompt, [good.answers[0], other])], chat, 512, 2)
    assert "the engine saw" in made.rejected[0].reason


def test_the_dataset_of_a_fixed_conversation_changes_only_with_its_step_version(chat: ChatTemplate) -> None:
    """Golden output: when this fails and the change is meant, raise `STEP_VERSION["dataset"]` too."""
    bytes_only = ChatTemplate(tiny_tokenizer(259, chat.tokenizer.chat_template), [END], "bytes")
    rows = [_two_turns(bytes_only, [*_ids(bytes_only, "ok"), END], "stop"), _single(3, [50, END], key="x")]
    made = build_samples(rows, bytes_only, max_length=46, min_trainable_tokens=2)
    assert [(len(s), s.prompt_length, int(s.loss_mask.sum())) for s in made.samples] == [
        (46, 44, 5),
        (5, 3, 2),
    ]
    assert (STEP_VERSION["dataset"], content_hash(made.samples)) == (2, "ac8c11f10b32c30468937b3a6cf5f012")


def test_conversations_come_back_as_they_were_written(chat: ChatTemplate, tmp_path: Path) -> None:
    line_separator = chr(0x2028)
    prompt = Prompt("k", "7", "code", "train", "system", (f"a{line_separator}b", "é"))
    rows = [Conversation(prompt, [Answer("k", 0, [1], [5, END], f"x\n{line_separator}", "stop")])]
    write_conversations(tmp_path, rows)
    assert read_conversations(tmp_path) == rows
    with pytest.raises(DataError, match="cannot read the conversations"):
        read_conversations(tmp_path / "nowhere")
