from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eagle3_core.data.template import ChatTemplate, RenderedChat, end_of_turn_ids, load_chat_template
from eagle3_core.errors import DataError
from tests.tiny import (
    CHATML,
    CHATML_GENERATION,
    CHATML_STRICT,
    IM_END,
    make_tiny_target,
    tiny_tokenizer,
)

pytestmark = pytest.mark.engine

BYTES_ONLY = 259
"""Tokenizer size without merges: three special tokens and one token for each byte."""
END_ID = 2
HI_OK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
TWO_TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is the sea?"},
    {"role": "assistant", "content": "The sea is\nbig."},
    {"role": "user", "content": "The sea is\nbig."},
    {"role": "assistant", "content": "Yes, the sea."},
]
REASONING = CHATML.replace(
    "message['content'] +",
    "((message['content'].split('</think>')[-1] if not loop.last else message['content'])"
    " if message['role'] == 'assistant' else message['content']) +",
)
"""Leaves the reasoning of earlier answers out, as reasoning models' templates do."""
EMPTY_REASONING = CHATML.replace(
    "{{ message['content']",
    "{% if message['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ message['content']",
)
SHOUTING = CHATML.replace("message['content'] +", "message['content'].upper() +")
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ 'You are kind.' }}{% endif %}" + CHATML
UNSPECIAL = (
    "{% for message in messages %}{{ ' th' if message['role'] == 'assistant' else '?' }}"
    "{{ message['content'] + 'e' }}{% endfor %}{% if add_generation_prompt %}{{ ' th' }}{% endif %}"
)
"""Ends turns with a plain letter, which the tokenizer joins with those before it: " th" + "e" is one."""
MULTI_BLOCK = CHATML_GENERATION.replace(
    "{% generation %}", "{% generation %}{{ '' }}{% endgeneration %}{% generation %}"
)


def _chat(template: str = CHATML, size: int = BYTES_ONLY) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(size, template), [END_ID], "tiny")


def _masked(chat: ChatTemplate, rendered: RenderedChat) -> str:
    return chat.tokenizer.decode(rendered.input_ids[rendered.loss_mask == 1])


@pytest.mark.parametrize("template", [CHATML, CHATML_GENERATION, CHATML_STRICT])
def test_the_mask_of_a_hand_made_chat(template: str) -> None:
    chat = _chat(template)
    rendered = chat.render(HI_OK)
    tokens = chat.tokenizer.convert_ids_to_tokens(rendered.input_ids.tolist())
    expected = [
        ("<|im_start|>", 0), ("u", 0), ("s", 0), ("e", 0), ("r", 0), ("Ċ", 0), ("h", 0), ("i", 0),
        ("<|im_end|>", 0), ("Ċ", 0),
        ("<|im_start|>", 0), ("a", 0), ("s", 0), ("s", 0), ("i", 0), ("s", 0), ("t", 0), ("a", 0), ("n", 0),
        ("t", 0), ("Ċ", 0), ("o", 1), ("k", 1), ("<|im_end|>", 1), ("Ċ", 0),
    ]  # fmt: skip
    assert list(zip(tokens, rendered.loss_mask.tolist(), strict=True)) == expected
    assert rendered.answers == ((21, 24),)
    assert (rendered.input_ids.dtype, rendered.loss_mask.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("size", [BYTES_ONLY, 500])
def test_templates_with_and_without_generation_tags_give_identical_masks(size: int) -> None:
    plain, tagged = _chat(CHATML, size), _chat(CHATML_GENERATION, size)
    a, b = plain.render(TWO_TURNS), tagged.render(TWO_TURNS)
    assert a.input_ids.tolist() == b.input_ids.tolist()
    assert a.loss_mask.tolist() == b.loss_mask.tolist()
    assert _masked(plain, a) == f"The sea is\nbig.{IM_END}Yes, the sea.{IM_END}"


def test_tags_that_do_not_mark_each_answer_once_are_not_relied_on() -> None:
    assert _chat(MULTI_BLOCK).render(TWO_TURNS).answers == _chat().render(TWO_TURNS).answers


def test_a_prompt_ends_with_the_generation_header_and_may_hold_answers() -> None:
    chat = _chat()
    messages = [*HI_OK, {"role": "user", "content": "so?"}]
    rendered = chat.render(messages, add_generation_prompt=True)
    assert rendered.input_ids.tolist() == chat.prompt_ids(messages)
    assert chat.tokenizer.decode(rendered.input_ids).endswith("so?<|im_end|>\n<|im_start|>assistant\n")
    assert _masked(chat, rendered) == f"ok{IM_END}"
    assert chat.render(messages[:1]).answers == ()


@pytest.mark.parametrize("content", ["", " ", " ok ", "\n\nok", f"a {IM_END} b", "日本 é"])
def test_odd_answers_are_found_exactly(content: str) -> None:
    chat = _chat()
    messages = [HI_OK[0], {"role": "assistant", "content": content}, HI_OK[0], HI_OK[1]]
    assert _masked(chat, chat.render(messages)) == f"{content}{IM_END}ok{IM_END}"


def test_a_system_message_that_the_template_adds_is_no_answer() -> None:
    chat = _chat(DEFAULT_SYSTEM)
    rendered = chat.render(TWO_TURNS[1:])
    assert _masked(chat, rendered) == f"The sea is\nbig.{IM_END}Yes, the sea.{IM_END}"


def test_reasoning_that_the_template_leaves_out_is_not_missed() -> None:
    chat = _chat(REASONING)
    messages = [HI_OK[0], {"role": "assistant", "content": "<think>hm</think>ok"}, HI_OK[0]]
    rendered = chat.render(messages, add_generation_prompt=True)
    assert "hm" not in chat.tokenizer.decode(rendered.input_ids)
    assert _masked(chat, rendered) == f"ok{IM_END}"


def test_what_the_template_puts_before_an_answer_is_not_trained_on() -> None:
    chat = _chat(EMPTY_REASONING)
    assert _masked(chat, chat.render(HI_OK)) == f"ok{IM_END}"


def test_an_answer_that_cannot_be_found_is_an_error_that_names_the_template() -> None:
    with pytest.raises(DataError, match=r"template of tiny renders: .*'ok'.*'OK<\|im_end\|>") as caught:
        _chat(SHOUTING).render(HI_OK)
    assert "generation" in str(caught.value)


@pytest.mark.parametrize(
    "answers",
    [["1 th"], ["", "1"]],
    ids=["the last token is not the end of turn alone", "no token lies wholly inside"],
)
def test_an_answer_whose_end_of_turn_is_no_token_of_its_own_is_an_error(answers: list[str]) -> None:
    tokenizer = tiny_tokenizer(500, UNSPECIAL)
    (end,) = tokenizer("e", add_special_tokens=False)["input_ids"]
    chat = ChatTemplate(tokenizer, [end], "tiny")
    assert _masked(chat, chat.render(HI_OK)) == "oke"
    messages = [m for text in answers for m in (HI_OK[0], {"role": "assistant", "content": text})]
    with pytest.raises(DataError, match="the tokens of an answer do not end with an end-of-turn token"):
        chat.render(messages)


def test_a_template_that_refuses_the_roles_is_an_error_with_its_words() -> None:
    with pytest.raises(DataError, match="refuses the conversation: TemplateError: roles must alternate"):
        _chat(CHATML_STRICT).render([HI_OK[1], HI_OK[0]])


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("'%(x)s' % {}", "KeyError: 'x'"),
        ("'{}'.format()", "IndexError: "),
        ("1 // 0", "ZeroDivisionError: "),
        ("2.0 ** 9999", "OverflowError: "),
        ("1 + 'x'", "TypeError: "),
        ("''.index('x')", "ValueError: substring not found"),
        ("x.y", "UndefinedError: 'x' is undefined"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal_with_its_class(expression: str, error: str) -> None:
    chat = _chat("{% if messages[0]['content'] == 'bad' %}{{ " + expression + " }}{% endif %}" + CHATML)
    assert chat.prompt_ids(HI_OK)
    bad = [{"role": "user", "content": "bad"}]
    with pytest.raises(DataError, match=f"refuses the conversation: {error}"):
        chat.prompt_ids(bad)
    with pytest.raises(DataError, match=f"refuses the conversation: {error}"):
        chat.render([*bad, HI_OK[1]])


def test_borders_without_offsets_are_those_with_offsets() -> None:
    chat = _chat(CHATML, 500)
    text = chat._render(TWO_TURNS, add_generation_prompt=False)
    span = (text.index("Yes"), text.index("Yes") + len(f"Yes, the sea.{IM_END}"))
    assert chat._prefix_ranges(text, [span]) == chat._token_ranges(text, [span])
    inside_a_token = text.index("sea?") + 1
    with pytest.raises(DataError, match="reaches across"):
        chat._prefix_ranges(text, [(inside_a_token, inside_a_token + 1)])


def test_generated_tokens_decode_without_their_end_of_turn() -> None:
    chat = _chat()
    ids = chat.tokenizer("ok", add_special_tokens=False)["input_ids"]
    assert chat.decode_answer([*ids, END_ID]) == "ok" == chat.decode_answer(ids)
    assert chat.decode_answer([END_ID]) == ""


def test_a_tokenizer_without_template_or_end_of_turn_is_an_error() -> None:
    with pytest.raises(DataError, match="tiny has no chat template"):
        _chat("")
    with pytest.raises(DataError, match="no end-of-turn token"):
        ChatTemplate(tiny_tokenizer(), [], "tiny")


def test_the_ends_of_a_turn_come_from_the_target_and_its_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, num_layers=1)
    chat = load_chat_template(folder)
    assert chat.end_ids == {END_ID}
    assert chat.num_ids == 500
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert end_of_turn_ids(folder, chat.tokenizer) == {0, 2}
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        load_chat_template(tmp_path / "nowhere")
