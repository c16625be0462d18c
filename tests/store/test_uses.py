"""Notes of runs in progress: who uses what, and when that is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import StoreError
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.store.local import LocalStore
from eagle3_core.store.uses import STALE_SECONDS, RunUse, Use, current_uses, end_use, used_artifacts

CAPTURE = ArtifactRef(kind="capture", id="0123456789abcdef")


def note(root: Path, run_id: str, process: str, boot: str, age_seconds: float = 0.0) -> Path:
    use = Use(run_id=run_id, process=process, boot=boot, host="h", artifacts=(CAPTURE,))
    path = root / "uses" / f"{run_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(use.model_dump_json())
    os.utime(path, (time.time() - age_seconds,) * 2)
    return path


def gone_process() -> str:
    code = "from eagle3_core.host.process_tree import ProcessId; print(ProcessId.current())"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    )
    return ended.stdout.strip()


def test_a_store_without_notes_is_used_by_nobody_and_stays_as_it_is(tmp_path: Path) -> None:
    assert current_uses(LocalStore(tmp_path / "store")) == []
    assert not (tmp_path / "store").exists()


def test_a_run_is_in_the_store_from_its_first_word_to_its_end(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with RunUse("r") as use:
        use.say(store, [CAPTURE])
        assert list(used_artifacts(current_uses(store))) == [CAPTURE]
    assert [use.run_id for use in current_uses(store)] == ["r"]
    end_use(store, "r")
    assert current_uses(store) == []


def test_a_run_keeps_its_note_young(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with RunUse("r", heartbeat_seconds=0.02) as use:
        use.say(store, [CAPTURE])
        path = tmp_path / "uses" / "r.json"
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 120
        while path.stat().st_mtime < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert path.stat().st_mtime > 10


def test_a_run_that_is_over_for_others_and_wakes_up_leaves_no_note(tmp_path: Path) -> None:
    """It stood still for so long that garbage collection has removed its note."""
    notes = LocalStore(tmp_path).notes("uses")
    notes.write("r.json", "{}")
    notes.remove("r.json")
    notes.touch("r.json")
    assert notes.read("r.json") is None


def test_a_note_of_a_killed_run_of_this_host_counts_no_more_and_is_removed(tmp_path: Path) -> None:
    dead = note(tmp_path, "dead", gone_process(), boot_id())
    living = note(tmp_path, "living", str(ProcessId.current()), boot_id(), age_seconds=10 * STALE_SECONDS)
    assert [use.run_id for use in current_uses(LocalStore(tmp_path))] == ["living"]
    assert (dead.exists(), living.exists()) == (False, True)


def test_a_note_of_another_host_counts_until_nobody_has_touched_it_for_long(tmp_path: Path) -> None:
    note(tmp_path, "far", "1:1:other", "another boot", age_seconds=STALE_SECONDS - 60)
    stale = note(tmp_path, "stale", "1:1:other", "another boot", age_seconds=STALE_SECONDS + 60)
    assert [use.run_id for use in current_uses(LocalStore(tmp_path))] == ["far"]
    assert not stale.exists()


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_note_that_cannot_be_read_stops_the_search_for_what_may_go(tmp_path: Path, content: bytes) -> None:
    note(tmp_path, "r", "1:1:x", "b").write_bytes(content)
    with pytest.raises(StoreError, match=r"uses/r\.json .* cannot be read; remove it if no run"):
        current_uses(LocalStore(tmp_path))
