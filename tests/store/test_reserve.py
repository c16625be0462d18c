"""Reservations of space: seen by other runs, kept up to date, gone with their owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import HostError
from eagle3_core.host.volume import volume_of
from eagle3_core.store.reserve import STALE_SECONDS, Reservations

KEY = "the disk"


@pytest.fixture
def reservations(tmp_path: Path) -> Reservations:
    return Reservations(str(tmp_path / "reservations"))


class Disk:
    key = KEY


DISK = Disk()


def other_process(folder: Path, run_id: str) -> None:
    """A reservation of 100 bytes by a process that ends."""
    code = (
        "import sys; from eagle3_core.store.reserve import Reservations; "
        f"Reservations(sys.argv[1]).reserve(sys.argv[2], {{'{KEY}': {{'capture/a': 100}}}})"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), run_id], cwd=PROJECT_ROOT, check=True)


def test_other_runs_see_what_one_has_yet_to_write(reservations: Reservations) -> None:
    reservations.reserve("a", {KEY: {"capture/x": 70, "logs": 30}, "another disk": {"logs": 5}})
    assert reservations.others("b", DISK) == {"a": 100}  # type: ignore[arg-type]
    assert reservations.others("a", DISK) == {}  # type: ignore[arg-type]
    reservations.reserve("a", {KEY: {"capture/x": 20, "logs": 0}})
    assert reservations.others("b", DISK) == {"a": 20}  # type: ignore[arg-type]
    reservations.release("a")
    assert reservations.others("b", DISK) == {}  # type: ignore[arg-type]


def test_what_two_runs_make_together_is_counted_once(reservations: Reservations) -> None:
    reservations.reserve("a", {KEY: {"capture/x": 70, "export/y": 30}})
    assert reservations.others("b", DISK, frozenset({"capture/x"})) == {"a": 30}  # type: ignore[arg-type]


def test_of_two_runs_that_do_not_fit_together_only_the_later_one_waits(reservations: Reservations) -> None:
    first = reservations.reserve("z-first", {KEY: {"capture/x": 70}})
    reservations.reserve("a-second", {KEY: {"capture/y": 50}})
    assert reservations.reserve("z-first", {KEY: {"capture/x": 60}}).since == first.since
    assert reservations.before("z-first", DISK) == {}  # type: ignore[arg-type]
    assert reservations.before("a-second", DISK) == {"z-first": 60}  # type: ignore[arg-type]
    assert reservations.before("unknown", DISK) == {"z-first": 60, "a-second": 50}  # type: ignore[arg-type]


def test_the_reservation_of_a_process_that_is_gone_is_removed(reservations: Reservations) -> None:
    other_process(reservations.folder, "dead")
    assert (reservations.folder / "dead.json").exists()
    assert reservations.all() == []
    assert not (reservations.folder / "dead.json").exists()


def test_one_of_another_container_counts_while_it_is_kept_up_to_date(reservations: Reservations) -> None:
    reservations.reserve("far", {KEY: {"logs": 5}})
    path = reservations.folder / "far.json"
    document = json.loads(path.read_text())
    document["owner"] |= {"pid": 1, "namespace": "elsewhere pid:[3]"}
    path.write_text(json.dumps(document))
    assert [one.run_id for one in reservations.all()] == ["far"]
    old = path.stat().st_mtime - STALE_SECONDS - 60
    os.utime(path, (old, old))
    assert reservations.all() == []


def test_what_is_no_reservation_is_passed_over(reservations: Reservations) -> None:
    reservations.folder.mkdir(parents=True)
    (reservations.folder / "half.json").write_text("{")
    assert reservations.all() == []


def test_a_folder_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match=r"cannot reserve space in .*limits\.reservations"):
        Reservations(str(tmp_path / "file" / "below")).reserve("a", {})


def test_without_a_setting_they_lie_in_the_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Reservations(None).folder == tmp_path / "eagle3" / "reservations"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert Reservations(None).folder == Path.home() / ".local/state/eagle3/reservations"


def test_paths_on_one_file_system_have_one_key_also_before_they_exist(tmp_path: Path) -> None:
    assert volume_of(tmp_path / "not" / "there") == volume_of(tmp_path)
    assert volume_of(Path("/proc")).key != volume_of(tmp_path).key
    assert volume_of(Path("/proc/self")).mount == Path("/proc")
