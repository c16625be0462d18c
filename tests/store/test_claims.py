"""Claims of several processes and hosts on the same names; no torch."""

from __future__ import annotations

import json
import os
import shutil
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
    claims = Claims(tmp_path, stale_seconds=500)
    assert claims.is_held_elsewhere("a")
    assert not claims.take("a")
    foreign_claim(tmp_path, age_seconds=1000)
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


@pytest.mark.parametrize("moment", ["_is_free", "_beside"])
def test_a_dead_claim_that_another_host_takes_over_first_stays_with_that_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other one is first after the second has judged, or just before it moves the claim away."""
    foreign_claim(tmp_path, age_seconds=1000)
    first, second = (Claims(tmp_path, stale_seconds=500) for _ in range(2))
    do = getattr(second, moment)

    def do_slowly(*arguments):  # type: ignore[no-untyped-def]
        found = do(*arguments)
        if arguments[1] != "draft":
            assert first.take("a")
        return found

    monkeypatch.setattr(second, moment, do_slowly)
    assert not second.take("a")
    assert first.is_mine("a")
    first.close()
    second.close()


def test_a_claim_that_is_given_back_while_it_is_judged_is_left_to_who_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never moved away from who has it, not even for a moment."""
    first, second, third = (Claims(tmp_path) for _ in range(3))
    assert first.take("a")
    make = second._make
    made: list[bool] = []

    def make_and_let_go(path: Path) -> bool:
        made.append(make(path))
        if len(made) == 1:
            first.release("a")
        return made[-1]

    def never(*_: object) -> bool:
        raise AssertionError("moved away")

    monkeypatch.setattr(second, "_make", make_and_let_go)
    monkeypatch.setattr(second, "_remove_stale", never)
    assert second.take("a")
    assert not third.take("a")
    for claims in (first, second, third):
        claims.close()


def test_where_the_folder_is_removed_meanwhile_nothing_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the staging folder of a capture that another process has just completed."""
    folder = tmp_path / "claims"
    claims = Claims(folder)
    foreign_claim(folder, age_seconds=0)
    read = claims.is_mine

    def read_and_remove(name: str) -> bool:
        found = read(name)
        shutil.rmtree(folder)
        return found

    monkeypatch.setattr(claims, "is_mine", read_and_remove)
    assert not claims.is_held_elsewhere("a")
    monkeypatch.undo()
    claims.close()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write into .*/file/claims .*check the mount"):
        Claims(tmp_path / "file" / "claims")
