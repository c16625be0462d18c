from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.data.conversations import PromptSet, limit_prompts, read_prompts
from eagle3_core.errors import DataError


def _user(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def _read(
    tmp_path: Path, rows: list[Any], heldout_fraction: float = 0.0, limit: int | None = None
) -> PromptSet:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_prompts([path], heldout_fraction, limit)


def test_turns_system_message_and_names_are_read(tmp_path: Path) -> None:
    row = {
        "id": 7,
        "kind": "dialogue",
        "split": "heldout",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "user", "content": "Two?"},
        ],
    }
    (prompt,) = _read(tmp_path, [row]).prompts
    assert (prompt.id, prompt.kind, prompt.split, prompt.system) == ("7", "dialogue", "heldout", "Be brief.")
    assert prompt.turns == ("One?", "Two?")
    assert prompt.messages(["1"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    assert prompt.messages(["1", "2"])[-1] == {"role": "assistant", "content": "2"}


def test_answers_in_a_row_are_replaced_even_before_the_first_user_turn(tmp_path: Path) -> None:
    turns = [("gpt", "Hello!"), ("human", "Who are you?"), ("gpt", "A model."), ("human", "Sure?")]
    found = _read(tmp_path, [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    assert found.prompts[0].turns == ("Who are you?", "Sure?")
    assert found.num_replaced_answers == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1]", "not a JSON object but list"),
        ({"kind": "code", "a\nb": 1}, r"no messages, only 'a\nb', 'kind'"),
        ({"messages": ["hi"]}, "messages is not a list"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 (user) has no text"),
        (_user("  "), "message 1 (user) has no text"),
        (
            {"messages": [*_user("hi")["messages"], {"role": "system", "content": "x"}]},
            "message 2 is a system",
        ),
        ({"messages": [{"role": "observation", "content": "42"}]}, "role 'observation'"),
        ({"messages": [{"role": "function", "content": "42"}]}, "role 'function'"),
        ({"messages": [{"role": "my-model", "content": "42"}]}, "role 'my-model'"),
        ({"messages": [{"content": "42"}]}, "role None"),
        (_user("hi", tools=[{"name": "f"}]), "uses tools"),
        (_user("hi", tools='[{"name": "f"}]'), "uses tools"),
        (
            {
                "messages": [
                    *_user("hi")["messages"],
                    {"role": "assistant", "content": None, "tool_calls": [1]},
                ]
            },
            "uses tool_calls",
        ),
        (_user("hi", split="test"), "split is 'test'; expected one of train, heldout"),
        (_user("hi", kind=3), "kind is 3"),
        (_user("hi", id=[1]), "id is [1]"),
    ],
)
def test_a_row_that_cannot_be_used_is_rejected_with_place_and_reason(
    tmp_path: Path, row: Any, reason: str
) -> None:
    found = _read(tmp_path, [_user("first"), row, _user("last")])
    assert [prompt.turns for prompt in found.prompts] == [("first",), ("last",)]
    (rejection,) = found.rejected
    assert rejection.key == "rows.jsonl:2"
    assert reason in rejection.reason
    assert found.num_read == 3 == len(found.prompts) + len(found.rejected)


@pytest.mark.parametrize(
    "row",
    [
        _user("a\ud800"),
        _user("hi", id="\ud83d"),
        _user("hi", kind="a\udfff"),
        _user("hi", split="\ud800"),
        _user("hi", unused={"deep": [{"\udc00": 1}]}),
        {"\ud800": 1},
        {"messages": [{"role": "\ud800", "content": "hi"}]},
        {"messages": [*_user("hi")["messages"], {"role": "assistant", "content": "\ude00\ud83d"}]},
    ],
)
def test_half_a_surrogate_pair_anywhere_is_a_rejection_that_can_be_written(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    found = _read(tmp_path, [_user("first"), row, _user("\U0001f600")])
    assert [prompt.turns for prompt in found.prompts] == [("first",), ("\U0001f600",)]
    (rejection,) = found.rejected
    assert rejection.reason.startswith("half a surrogate pair in ")
    assert "\\ud" in rejection.model_dump_json()


def test_a_reason_shows_half_a_surrogate_pair_with_the_text_around_it(tmp_path: Path) -> None:
    (rejection,) = _read(tmp_path, [_user("x" * 30 + "\ud800" + "y" * 30)]).rejected
    assert rejection.reason == f"half a surrogate pair in '{'x' * 20}\\ud800{'y' * 20}'"


def test_unused_fields_and_unknown_roles_are_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [_user("a", time="now"), _user("b", time=5), *({"messages": [{"role": "bot"}]} for _ in range(3))]
    with caplog.at_level(logging.WARNING):
        found = _read(tmp_path, rows)
    assert len(found.prompts) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "rejected 3 rows with the role 'bot'",
        "the field 'time' of 2 rows is not used",
    ]


def test_keys_follow_the_content_and_exact_duplicates_are_reported(tmp_path: Path) -> None:
    rows = [_user("a", id="x"), _user("b", id="x"), _user("c"), _user("d", id="y"), _user("a", id="z")]
    found = _read(tmp_path, rows)
    keys = {prompt.turns[0]: prompt.key for prompt in found.prompts}
    assert len(set(keys.values())) == 4
    assert [(r.key, r.reason) for r in found.rejected] == [
        ("rows.jsonl:5", f"exact duplicate of the prompt {keys['a']} (id x)")
    ]
    shuffled = _read(tmp_path, [rows[i] for i in (4, 2, 3, 1)], limit=4)
    assert {prompt.turns[0]: prompt.key for prompt in shuffled.prompts} == keys


def test_a_system_message_makes_another_key(tmp_path: Path) -> None:
    with_system = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}
    found = _read(tmp_path, [_user("a"), with_system])
    assert len({prompt.key for prompt in found.prompts}) == 2


def test_splits_are_stratified_and_do_not_depend_on_order(tmp_path: Path) -> None:
    rows = [
        _user(f"{kind} {i}", kind=kind) for kind, n in (("a", 40), ("b", 20), ("c", 20)) for i in range(n)
    ]
    found = _read(tmp_path, rows, heldout_fraction=0.1)
    heldout = Counter(prompt.kind for prompt in found.prompts if prompt.split == "heldout")
    assert heldout == {"a": 4, "b": 2, "c": 2}
    random.Random(1).shuffle(rows)
    again = _read(tmp_path, rows, heldout_fraction=0.1)
    assert {p.key: p.split for p in again.prompts} == {p.key: p.split for p in found.prompts}


def test_small_kinds_share_the_held_out_rows_by_remainder(tmp_path: Path) -> None:
    rows = [_user(f"{kind} {i}", kind=kind) for kind in "ab" for i in range(6)]
    found = _read(tmp_path, rows, heldout_fraction=0.25)
    assert Counter(p.kind for p in found.prompts if p.split == "heldout") == {"a": 2, "b": 1}


def test_a_row_that_names_its_split_keeps_it(tmp_path: Path) -> None:
    rows = [_user(f"q{i}", split="train" if i else "heldout") for i in range(20)]
    found = _read(tmp_path, rows, heldout_fraction=0.5)
    assert [prompt.split for prompt in found.prompts] == ["heldout"] + ["train"] * 19


@pytest.mark.parametrize("limit", [4, 10, 30])
def test_a_limit_spreads_over_kinds_and_both_splits(tmp_path: Path, limit: int) -> None:
    rows = [_user(f"{kind} {i}", kind=kind) for kind in "abcd" for i in range(20)]
    found = _read(tmp_path, rows, heldout_fraction=0.1, limit=limit)
    splits = Counter(prompt.split for prompt in found.prompts)
    assert len(found.prompts) == limit
    assert found.num_left_out == 80 - limit
    assert splits["heldout"] == max(2, round(limit / 10))
    train = Counter(prompt.kind for prompt in found.prompts if prompt.split == "train")
    assert max(train.values()) - min(train.get(kind, 0) for kind in "abcd") <= 1
    places = [rows.index(_user(p.turns[0], kind=p.kind)) for p in found.prompts]
    assert places == sorted(places), "a limit keeps the order of the rows"


def test_a_limit_above_the_number_of_rows_keeps_them_all(tmp_path: Path) -> None:
    found = _read(tmp_path, [_user(f"q{i}") for i in range(5)], heldout_fraction=0.2, limit=50)
    assert len(found.prompts) == 5
    assert limit_prompts(found.prompts, 5) == list(found.prompts)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_prompts([tmp_path / "x.jsonl"], 0.1)
