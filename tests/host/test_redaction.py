"""What counts as a secret, and that it is replaced wherever it stands."""

from __future__ import annotations

import pytest

from eagle3_core.host.redaction import Redactor, is_secret


def test_only_secrets_are_replaced():
    redact = Redactor(
        {"HF_TOKEN": "hf_abcdefgh", "PATH": "/usr/bin", "MAX_TOKENS": "12345678", "X_SECRET": "s"}
    )
    assert redact("hf_abcdefgh in /usr/bin 12345678 s") == "*** in /usr/bin 12345678 s"


def test_secrets_are_replaced_at_any_depth():
    redact = Redactor({"HF_TOKEN": "hf_abcdefgh"})
    found = {"rows": [{"key": "at hf_abcdefgh", "count": 3}, ("hf_abcdefgh",)], "hf_abcdefgh": None}
    assert redact.all_of(found) == {"rows": [{"key": "at ***", "count": 3}, ["***"]], "***": None}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "hf_12345678", True),
        ("HF_TOKEN", "short", False),
        ("MAX_TOKENS", "100000000", False),
        ("TOKENIZERS_PATH", "/models/tokenizer", False),
        ("AWS_SECRET_ACCESS_KEY", "abcdefgh", True),
    ],
)
def test_what_counts_as_a_secret(name, value, expected):
    assert is_secret(name, value) is expected
