"""Token ids counted from each kind of tokenizer file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from eagle3_core.errors import TargetError
from eagle3_core.target.files import FolderFiles
from eagle3_core.target.tokenizer import tokenizer_entries


def entries(folder: Path) -> int | None:
    return tokenizer_entries(FolderFiles(folder))


def test_added_tokens_beyond_the_vocabulary_count(tmp_path: Path) -> None:
    document = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert entries(tmp_path) == 6
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"7": {}}}))
    assert entries(tmp_path) == 8


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}))
    assert entries(tmp_path) == 2


def test_a_tiktoken_file_has_a_rank_on_each_line(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([rank])).decode()} {rank}" for rank in range(200)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"255": {}}}))
    assert entries(tmp_path) == 256


def test_a_sentencepiece_model_is_counted_by_its_pieces(tmp_path: Path) -> None:
    piece = b"\x0a\x01a\x15\x00\x00\x80\x3f"  # text "a", score 1.0
    trainer = b"\x12\x03\x08\x96\x01"  # another field, whose length takes one byte
    (tmp_path / "tokenizer.model").write_bytes((b"\x0a" + bytes([len(piece)]) + piece) * 300 + trainer)
    assert entries(tmp_path) == 300


def test_vocab_json_and_added_tokens_are_an_old_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 2}))
    assert entries(tmp_path) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", b"{"), ("tokenizer.model", b"\x0a\xff"), ("tiktoken.model", b"no rank\n")],
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TargetError, match=rf"{name} is no tokenizer"):
        entries(tmp_path)


def test_without_a_known_tokenizer_nothing_is_claimed(tmp_path: Path) -> None:
    assert entries(tmp_path) is None
