"""What a cleanup removes of captures: staged files that nobody works on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.capture.shard_queue import OWNER_NAME, Staging
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.host.process_tree import boot_id
from eagle3_core.leftovers import remove_leftovers
from eagle3_core.store.condemned import condemn
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import LocalStore

CAPTURE = ArtifactPlan(kind="capture", identity={"for": "a test"})


def staged(root: Path) -> tuple[LocalStore, Path, Path]:
    """A store with a session of this process and one of a process that is gone, each with a file."""
    store = LocalStore(root)
    staging = Staging(store, CAPTURE.ref)
    mine, dead = staging.open_session("mine"), staging.open_session("dead")
    for folder in (mine, dead):
        (folder / "shard-00000.safetensors").write_bytes(b"states")
    code = "from eagle3_core.host.process_tree import ProcessId; print(ProcessId.current())"
    gone = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    )
    (dead / OWNER_NAME).write_text(f"{gone.stdout.strip()}\n{boot_id()}")
    return store, mine, dead


def test_what_ended_sessions_have_staged_goes_and_a_living_one_keeps_its_files(tmp_path: Path) -> None:
    store, mine, dead = staged(tmp_path)
    removed, busy = remove_leftovers(store, [CAPTURE.ref])
    assert sorted(Path(path).name for path in removed) == [OWNER_NAME, "shard-00000.safetensors"]
    assert removed[str(dead / "shard-00000.safetensors")] == 6
    assert (busy, dead.exists()) == ([], False)
    assert (mine / "shard-00000.safetensors").is_file()


def test_nothing_stays_staged_of_a_complete_capture(tmp_path: Path) -> None:
    store, mine, _ = staged(tmp_path)
    with store.writer(CAPTURE) as writer:
        writer.complete(result={})
    removed, _ = remove_leftovers(store, [CAPTURE.ref])
    assert len(removed) == 4
    assert not mine.parent.parent.exists()
    assert remove_leftovers(store, [CAPTURE.ref]) == ({}, [])


def test_what_a_living_session_makes_anew_of_a_condemned_capture_stays(tmp_path: Path) -> None:
    store, mine, dead = staged(tmp_path)
    with store.writer(CAPTURE) as writer:
        write_atomic(writer.folder / "shard", "wrong")
        manifest = writer.complete([writer.folder / "shard"], result={})
    condemn(store, manifest, {"shard": "of another layer"})
    remove_leftovers(store, [CAPTURE.ref])
    assert (mine / "shard-00000.safetensors").is_file()
    assert not dead.exists()


def test_a_capture_that_somebody_writes_is_left_alone(tmp_path: Path) -> None:
    store, _, dead = staged(tmp_path)
    with store.writer(CAPTURE):
        assert remove_leftovers(store, [CAPTURE.ref]) == ({}, [str(store.folder(CAPTURE.ref))])
    assert dead.exists()
