"""Claims of several processes and hosts on the same names; no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import StoreError
from eagle3_core.host.process_tree import ProcessId
from eagle3_core.store.claims import Claims


def test_of_two_processes_one_gets_a_shard_and_the_other_the_next(tmp_path: Path) -> None:
    first, second = Claims(tmp_path), Claims(tmp_path)
    assert first.take("a")
    assert not second.take("a")
    assert second.is_held_elsewhere("a")
    assert not first.is_held_elsewhere("a")
    assert second.take("b")
    first.release("a")
    assert second.take("a")
    second.release("a")
    second.close()
    first.close()
    assert not list(tmp_path.iterdir())


def test_the_claim_of_a_process_of_this_host_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from eagle3_core.store.claims import Claims; "
        "assert Claims(Path(sys.argv[1])).take('a'); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT_ROOT)
    assert done.returncode == 9
    claims = Claims(tmp_path)
    assert not claims.is_held_elsewhere("a")
    assert claims.take("a")
    claims.close()


def foreign_claim(tmp_path: Path, age_seconds: float) -> None:
    """A claim of a process on another host, touched so long ago by the file system's clock."""
    path = tmp_path / "a.claim"
    path.write_text(json.dumps({"process": "1:2:elsewhere pid:[3]", "token": "t"}))
    now = path.stat().st_mtime
    os.utime(path, (now - age_seconds, now - age_seconds))


def test_the_claim_of_another_host_counts_as_long_as_it_is_touched(tmp_path: Path) -> None:
    foreign_claim(tmp_path, age_seconds=60)
    claims = Claims(tmp_path, stale_seconds=90)
    assert claims.is_held_elsewhere("a")
    assert not claims.take("a")
    foreign_claim(tmp_path, age_seconds=100)
    assert claims.take("a")
    assert claims.is_mine("a")
    claims.close()


def test_a_host_of_the_same_name_is_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, namesake = ProcessId.current(), Claims(tmp_path)
    with monkeypatch.context() as there:
        there.setattr("eagle3_core.store.claims.boot_id", lambda: "of the other host")
        there.setattr(ProcessId, "current", lambda: here.model_copy(update={"start_ticks": 1}))
        first = Claims(tmp_path)
        assert first.take("a")
    assert namesake.is_held_elsewhere("a")
    assert not namesake.take("a")
    first.close()
    namesake.close()


def test_a_claim_that_a_crash_left_empty_is_taken_over_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "a.claim"
    path.write_text("")
    claims = Claims(tmp_path, stale_seconds=90)
    assert claims.is_held_elsewhere("a")
    os.utime(path, (0, 0))
    assert not claims.is_held_elsewhere("a")
    assert claims.take("a")
    claims.close()


def test_a_dead_claim_that_another_host_takes_over_first_stays_with_that_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_claim(tmp_path, age_seconds=100)
    first, second = (Claims(tmp_path, stale_seconds=90) for _ in range(2))
    judge = second._is_free

    def judge_slowly(*arguments):  # type: ignore[no-untyped-def]
        found = judge(*arguments)
        assert first.take("a")
        return found

    monkeypatch.setattr(second, "_is_free", judge_slowly)
    assert not second.take("a")
    assert first.is_mine("a")
    first.close()
    second.close()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write into .*/file/claims .*check the mount"):
        Claims(tmp_path / "file" / "claims")
