"""The store's benchmark: all its comparisons in small, and its figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import store

pytestmark = pytest.mark.engine


def test_the_ratio_is_the_median_over_rounds_side_by_side() -> None:
    found = store.summary([1.0, 2.0, 3.0], [2.0, 2.0, 1.0])
    assert found["round_ratios"] == [0.5, 1.0, 3.0]
    assert (found["ratio"], found["plain_seconds"], found["store_seconds"]) == (1.0, 2.0, 2.0)


def test_both_sides_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []
    found = store.take_turns(
        2, lambda: order.append("plain"), lambda: order.append("store"), lambda: order.append("prepare")
    )
    assert order[1::2] == ["store", "plain", "plain", "store", "store", "plain"]
    assert order[0::2] == ["prepare"] * 6
    assert len(found["round_ratios"]) == 2


def test_bytes_of_a_token_are_those_of_the_states_that_are_kept(tmp_path: Path) -> None:
    found = store.count_bytes(tmp_path / "bytes", hidden_size=64, num_tokens=32)
    assert found["all"]["states"] == found["all"]["four_states"] == 4 * 64 * 2
    assert found["loss_rows"]["states"] == 3.5 * 64 * 2
    assert found["loss_rows"]["states"] < found["loss_rows"]["file"] < found["all"]["file"]


def test_a_small_run_prints_every_comparison_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--hidden-size",
        "64",
        "--tokens",
        "32",
        "--shard-bytes",
        "65536",
        "--num-shards",
        "2",
        "--rounds",
        "1",
    ]
    written, folder = tmp_path / "result.json", tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setattr("sys.argv", ["store", *options, "--folder", str(folder), "--json", str(written)])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    store.main()
    printed = capsys.readouterr().out
    for name in store.LINES:
        assert f"\n{name}" in printed
    result = json.loads(written.read_text())
    assert all(result[name]["ratio"] > 0 for name in store.LINES)
    assert not list(folder.iterdir())
