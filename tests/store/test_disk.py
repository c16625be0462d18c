"""The guard: what fits above the reserve, when work pauses, goes on or fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from eagle3_core.errors import DiskFullError, HostError
from eagle3_core.host.volume import volume_of
from eagle3_core.sections import LimitsConfig
from eagle3_core.store import disk
from eagle3_core.store.disk import DiskGuard, as_host_error, guarding, make_room, patiently, unguarded
from eagle3_core.store.files import write_atomic
from eagle3_core.store.reserve import Reservations

KIB = 1 << 10


class Free:
    """The free space of every disk, as it changes from look to look; the last one stays."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.looks = list(sizes), 0

    def __call__(self, path: Path) -> int:
        size = self.sizes[min(self.looks, len(self.sizes) - 1)]
        self.looks += 1
        return size


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def limits(policy: str = "pause", reserve: int = 100, **more: object) -> LimitsConfig:
    document = {"min_free_disk_gib": reserve / (1 << 30), "on_full_disk": policy, **more}
    return LimitsConfig.model_validate(document)


def use(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> Free:
    free = Free(*sizes)
    monkeypatch.setattr(disk, "free_disk_bytes", free)
    return free


def test_bytes_fit_if_the_reserve_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, 1100)
    guard = DiskGuard(limits())
    assert guard.shortage(tmp_path, 1000) is None
    assert str(guard.shortage(tmp_path, 1001)) == (
        f"no space: 1,100 bytes free on {tmp_path}, 1,001 needed above the reserve"
    )


def test_it_waits_tells_why_once_paused_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, 500, 600, 700, 1100)
    told: list[str | None] = []
    polls: list[int] = []
    with caplog.at_level("INFO", "eagle3_core.store.disk"):
        DiskGuard(limits(), None, told.append, lambda: polls.append(1)).make_room(tmp_path, 1000, "a shard")
    assert [(reason or "on")[:17] for reason in told] == ["paused: no space:"] * 3 + ["on"]
    assert len(polls) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "paused before a shard: no space: 500 bytes free" in caplog.messages[0]


def test_by_policy_it_fails_at_once_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, 500)
    with pytest.raises(DiskFullError, match=r"^no space: 500 bytes free .* for a shard; make room and start"):
        DiskGuard(limits("fail")).make_room(tmp_path, 1000, "a shard")


def test_what_an_earlier_run_has_reserved_is_not_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, 1100)
    reservations = Reservations(None)
    key = volume_of(tmp_path).key
    reservations.reserve("first", {key: {"capture/x": 1}})
    reservations.reserve("second", {key: {"capture/y": 1000}})
    assert DiskGuard(limits(), "first").shortage(tmp_path, 1000) is None
    late = DiskGuard(limits(), "second").shortage(tmp_path, 1000)
    assert str(late).endswith("1,000 needed above the reserve and 1 reserved by first")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")


def test_a_write_that_finds_the_disk_full_is_repeated_when_it_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, 0, 0, 0, 2000)
    tries: list[int] = []

    def write() -> str:
        tries.append(1)
        if len(tries) == 1:
            full()
        return "written"

    assert DiskGuard(limits()).patiently(write, tmp_path, 1000, "a shard") == "written"
    assert len(tries) == 2


def test_a_full_quota_is_waited_for_although_the_disk_has_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, 1 << 40)
    told: list[str | None] = []
    tries: list[int] = []

    def write() -> None:
        tries.append(1)
        if len(tries) < 4:
            raise OSError(errno.EDQUOT, "quota")

    DiskGuard(limits(), None, told.append).patiently(write, tmp_path, 10, "a shard")
    assert told[0] == f"paused: no space: a write to {tmp_path} found the disk full"
    assert told[-1] is None


def test_a_small_file_that_fits_does_not_end_the_wait_of_a_large_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, 500)
    told: list[str | None] = []
    guard = DiskGuard(limits(), None, told.append)
    assert not guard.has_room(tmp_path, 1000, "a shard")
    guard.patiently(lambda: None, tmp_path, 1, "manifest.json")
    assert guard.is_paused
    assert told[-1] is not None


def test_other_errors_pass(tmp_path: Path) -> None:
    def broken() -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        DiskGuard(limits()).patiently(broken, tmp_path, 10, "a shard")


def test_without_a_guard_nothing_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, 0)
    make_room(tmp_path, 1000, "a shard")
    with pytest.raises(OSError, match="No space"):
        patiently(full, tmp_path, 1, "a file")
    with guarding(DiskGuard(limits("fail"))):
        with pytest.raises(DiskFullError):
            make_room(tmp_path, 1000, "a shard")
        with unguarded():
            make_room(tmp_path, 1000, "a shard")


def test_small_files_wait_for_space_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, 0, 0, 4096)
    sync, failures = os.fsync, [1]

    def fail_once(descriptor: int) -> None:
        if failures:
            failures.pop()
            full()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    with guarding(DiskGuard(limits())):
        write_atomic(tmp_path / "manifest.json", "{}")
    assert (tmp_path / "manifest.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, DiskFullError, "no space: /f cannot be written (No space left on device); make room"),
        (errno.EROFS, HostError, "/f cannot be written (Read-only file system); make it writable"),
        (errno.EACCES, HostError, "/f cannot be written (Permission denied); make it writable"),
    ],
)
def test_errors_of_the_system_become_one_clear_line(number: int, kind: type, said: str) -> None:
    error = as_host_error(OSError(number, os.strerror(number), "/f"))
    assert type(error) is kind
    assert str(error).startswith(said)
    assert as_host_error(OSError(errno.EIO, "broken", "/f")) is None
