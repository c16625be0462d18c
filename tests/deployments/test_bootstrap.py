from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.loading import load_script

pytestmark = pytest.mark.orchestrator  # nothing here depends on the environment: once is enough

bootstrap: Any = load_script("deployments/bootstrap.py")
Usage = namedtuple("Usage", "total used free")


def test_the_environment_of_sglang_is_made_only_when_it_is_asked_for(tmp_path: Path) -> None:
    assert [made.name for made in bootstrap.environments(tmp_path)] == ["orchestrator", "engine-cpu"]
    (sglang,) = bootstrap.sglang_environments(tmp_path)
    assert (sglang.name, sglang.has_project) == ("engine-sglang-cpu", False)
    assert all((bootstrap.LOCKS / name).is_file() for name in sglang.locks)


def tiny_wheel(folder: Path, version: str) -> Path:
    """A package with nothing in it."""
    path = folder / f"tiny-{version}-py3-none-any.whl"
    info = f"tiny-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", f"VERSION = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets up one small environment from a lock file that names a local wheel."""
    locks, folder = tmp_path / "locks", tmp_path / "envs"
    locks.mkdir()
    folder.mkdir()
    (locks / "tiny.txt").write_text(f"tiny @ {tiny_wheel(tmp_path, '1.0').as_uri()}\n")
    (locks / bootstrap.CUDA_LOCK).write_text("")
    monkeypatch.setattr(bootstrap, "LOCKS", locks)

    class Setup:
        environment = bootstrap.Environment(folder, "engine", ["tiny.txt"], 1, has_project=False)
        lock_file = locks / "tiny.txt"

        def __call__(self) -> None:
            with bootstrap.exclusive(folder) as lock:
                bootstrap.set_up([self.environment], bootstrap.Runner(lock))

        def version(self) -> str:
            command = [str(self.environment.python), "-c", "import tiny; print(tiny.VERSION)"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return Setup()


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 10, 13), (3, 14, 0)])
def test_other_pythons_are_refused_with_the_ones_that_work(version: tuple[int, int, int]) -> None:
    found = ".".join(map(str, version))
    with pytest.raises(bootstrap.SetupError, match=rf"is Python {found}; this project needs 3.11 to 3.13"):
        bootstrap.check_python(version)


def test_a_python_without_venv_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bootstrap.SetupError, match=r"lacks the module venv.*python3\.12-venv"):
        bootstrap.check_python((3, 12, 1))


def test_a_small_disk_is_refused_before_anything_is_made(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 9, 1000))
    with pytest.raises(bootstrap.SetupError, match=r"0\.0 GiB free; \d+ GiB are needed"):
        setup()
    assert not setup.environment.path.exists()


def test_a_complete_environment_is_kept_and_anything_else_is_made_anew(setup: Any, tmp_path: Path) -> None:
    setup()
    assert setup.version() == "1.0"
    stray = setup.environment.path / "stray"
    stray.touch()

    setup()
    assert stray.exists(), "a complete environment was made again"

    (setup.environment.path / bootstrap.MARKER).unlink()
    setup()
    assert not stray.exists(), "a half-made environment was used"

    stray.touch()
    setup.lock_file.write_text(f"tiny @ {tiny_wheel(tmp_path, '2.0').as_uri()}\n")
    setup()
    assert setup.version() == "2.0"
    assert not stray.exists(), "an environment of another lock was used"


def test_a_failed_install_is_one_line_with_the_log_and_leaves_no_marker(setup: Any, tmp_path: Path) -> None:
    setup.lock_file.write_text(f"tiny @ {(tmp_path / 'absent-1.0-py3-none-any.whl').as_uri()}\n")
    with pytest.raises(bootstrap.SetupError) as caught:
        setup()
    line = str(caught.value)
    assert "\n" not in line
    assert "absent-1.0" in line
    assert str(setup.environment.log) in line
    assert not (setup.environment.path / bootstrap.MARKER).exists()
    assert not setup.environment.is_complete()


def test_a_symbolic_link_in_the_place_of_an_environment_is_replaced_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    link = tmp_path / "engine"
    link.symlink_to(other)
    bootstrap.remove(link)
    assert not link.exists()
    assert (other / "precious").exists()


def test_the_marker_names_locks_interpreter_and_place(setup: Any) -> None:
    identity = setup.environment.identity()
    assert set(identity["locks"]) == {"tiny.txt", bootstrap.CUDA_LOCK}
    assert identity["path"] == str(setup.environment.path)
    assert json.loads(json.dumps(identity)) == identity


def test_a_second_setup_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with bootstrap.exclusive(tmp_path):
            order.append("second")

    with bootstrap.exclusive(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(timeout=120)
    assert order == ["first", "second"]


def test_what_a_killed_setup_still_writes_is_waited_for(tmp_path: Path) -> None:
    with bootstrap.exclusive(tmp_path) as lock:
        pip = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    with (tmp_path / bootstrap.LOCK_NAME).open("a") as handle:
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pip.communicate(b"\n")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("line", "version"),
    [("cuda: Optional[str] = None", ""), ("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8")],
)
def test_the_build_of_torch_is_read_from_the_installed_package(
    tmp_path: Path, line: str, version: str
) -> None:
    file = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n")
    assert bootstrap.cuda_version(tmp_path) == version
