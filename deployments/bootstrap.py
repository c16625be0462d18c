"""Creates the environments of this project from their lock files; needs nothing but Python's own library.

An environment is complete when its marker, written last, names the lock files, the interpreter and the place
it was made for. Any other folder is removed and made anew, so nothing half-made is used. Python 3.6 can read
this file's syntax, so that an old Python says that it is too old instead of failing on a line.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "docker" / "locks"
OLDEST, NEWEST = (3, 11), (3, 13)
RECIPE = 1  # raise it when the way of installing changes
MARKER, PROJECT_MARKER, LOCK_NAME = ".complete", ".project", ".lock"
GIB = 1 << 30
DOWNLOAD_BYTES = 1 * GIB
CUDA_BYTES = 8 * GIB
CUDA_LOCK = "engine-cuda-libs.txt"
PIP_INSTALL = ["-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"]


class SetupError(Exception):
    """Ends the setup with one line."""


class Environment:
    """One virtual environment: its name, its lock files in the order of installation, and its size."""

    def __init__(self, folder: Path, name: str, locks: "list[str]", size: int, has_project: bool) -> None:
        self.name, self.locks, self.size, self.has_project = name, locks, size, has_project
        self.path = folder / name
        self.python = self.path / "bin" / "python"
        self.log = folder / (name + ".log")

    def identity(self) -> dict:
        """What a complete environment was made from and for."""
        files = self.locks if self.has_project else [*self.locks, CUDA_LOCK]
        return {
            "recipe": RECIPE,
            "locks": {name: hashlib.sha256((LOCKS / name).read_bytes()).hexdigest() for name in files},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "path": str(self.path),
        }

    def is_complete(self) -> bool:
        """Whether the marker is there and right, and the interpreter still exists."""
        return read_json(self.path / MARKER) == self.identity() and self.python.exists()

    def project_identity(self) -> dict:
        """What the project's own installation depends on."""
        return {"pyproject": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()}

    def lacks_project(self) -> bool:
        """Whether the project has yet to be installed in place."""
        return self.has_project and read_json(self.path / PROJECT_MARKER) != self.project_identity()


def environments(folder: Path) -> "list[Environment]":
    """The project's environments below `folder`."""
    return [
        Environment(folder, "orchestrator", ["orchestrator.txt"], 1 * GIB, has_project=True),
        Environment(folder, "engine-cpu", ["engine-torch.txt", "engine-cpu.txt"], 4 * GIB, has_project=False),
    ]


def sglang_environments(folder: Path) -> "list[Environment]":
    """The environment for capture with SGLang on the CPU; only those who want it make it."""
    locks = ["engine-torch.txt", "engine-sglang-cpu.txt"]
    return [Environment(folder, "engine-sglang-cpu", locks, 3 * GIB, has_project=False)]


def main() -> int:
    """Make what is missing; returns 0 only when every environment is complete."""
    parser = argparse.ArgumentParser(description="Create the environments of this project.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".envs", help="where they go (%(default)s)")
    parser.add_argument("--sglang", action="store_true", help="create the one for SGLang, and no other")
    arguments = parser.parse_args()
    folder, wanted = arguments.folder.absolute(), sglang_environments if arguments.sglang else environments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_python(sys.version_info[:3])
        with exclusive(folder) as lock:
            set_up(wanted(folder), Runner(lock))
    except (SetupError, OSError) as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup was interrupted; the next one starts over with what is not complete", file=sys.stderr)
        return 130
    return 0


def check_python(version: tuple) -> None:
    """Refuse a Python or a system for which there are no packages."""
    found = ".".join(map(str, version))
    if not OLDEST <= tuple(version[:2]) <= NEWEST:
        supported = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
        others = [name for name in ("python3.13", "python3.12", "python3.11") if can_run(name)]
        remedy = f"try `make PYTHON={others[0]} ...`" if others else "install one of them"
        raise SetupError(f"{sys.executable} is Python {found}; this project needs {supported}; {remedy}")
    if not sys.platform.startswith("linux"):
        raise SetupError(f"this system is {sys.platform}; the engines exist for Linux only")
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"{sys.executable} lacks the module {missing[0]}; install it (Debian and Ubuntu: "
            f"`apt-get install python{version[0]}.{version[1]}-venv`)"
        )


def can_run(name: str) -> bool:
    """Whether a command of this name exists and starts (a version manager's stand-in may do nothing)."""
    try:
        return subprocess.call([name, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


@contextlib.contextmanager
def exclusive(folder: Path):
    """Hold `folder` for this setup and the processes it starts, and yield the lock's descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another setup of this checkout is running; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def set_up(wanted: "list[Environment]", runner: "Runner") -> None:
    """Make the environments that are not complete, at the same time."""
    missing = [environment for environment in wanted if not environment.is_complete()]
    if missing:
        started = time.monotonic()
        check_space(missing[0].path.parent, sum(environment.size for environment in missing))
        with concurrent.futures.ThreadPoolExecutor(len(missing)) as pool, runner:
            futures = [pool.submit(create, environment, runner) for environment in missing]
            for future in concurrent.futures.as_completed(futures):
                future.result()
        print(f"setup: environments made in {time.monotonic() - started:.0f} s", flush=True)
    for environment in wanted:
        if environment.lacks_project():
            install_project(environment, runner)


def check_space(folder: Path, needed: int) -> None:
    """Refuse to start when the environments, or the downloads on their way, would fill a disk."""
    needs = {folder: needed}
    downloads = Path(tempfile.gettempdir())
    if downloads.stat().st_dev == folder.stat().st_dev:
        needs[folder] += DOWNLOAD_BYTES
    else:
        needs[downloads] = DOWNLOAD_BYTES
    for place, size in needs.items():
        free = shutil.disk_usage(str(place)).free
        if free < size:
            raise SetupError(f"{place} has {free / GIB:.1f} GiB free; {size / GIB:.0f} GiB are needed there")


def create(environment: Environment, runner: "Runner") -> None:
    """Make one environment from nothing; its marker comes last."""
    remove(environment.path)
    environment.log.unlink() if environment.log.exists() else None
    # One write: two threads say this at once.
    line = f"setup: installing {environment.name}, for some minutes in silence (log: {environment.log})\n"
    print(line, end="", flush=True)
    runner.run(environment, [sys.executable, "-m", "venv", str(environment.path)])
    for name in environment.locks:
        runner.install(environment, "-r", str(LOCKS / name))
    if cuda_version(environment.path):
        check_space(environment.path.parent, CUDA_BYTES)
        runner.install(environment, "-r", str(LOCKS / CUDA_LOCK))
    os.sync()
    write_json(environment.path / MARKER, environment.identity())


def install_project(environment: Environment, runner: "Runner") -> None:
    """Put the checkout and its command into a complete environment."""
    with runner:
        runner.install(environment, "--no-build-isolation", "--editable", str(ROOT))
    write_json(environment.path / PROJECT_MARKER, environment.project_identity())


def remove(path: Path) -> None:
    """Remove an environment, marker first: an interrupted removal leaves nothing that looks complete."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        print(f"setup: removing {path}, which is not complete or not up to date", flush=True)
        with contextlib.suppress(FileNotFoundError):
            (path / MARKER).unlink()
        shutil.rmtree(str(path))


def cuda_version(path: Path) -> str:
    """The CUDA version that the installed torch was built for; empty for the CPU build or without torch."""
    for file in path.glob("lib/python*/site-packages/torch/version.py"):
        found = re.search(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", file.read_text(), re.MULTILINE)
        return found.group(1) if found else ""
    return ""


class Runner:
    """Runs commands, output to the environment's log; ends them all when the setup ends early.

    The commands hold the setup's lock too: as long as one of a killed setup still writes, the next one waits.
    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._running = []  # type: list[subprocess.Popen]
        self._guard = threading.Lock()
        self._stopped = False

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        if error_type is not None:
            with self._guard:
                self._stopped = True
                for process in self._running:
                    process.terminate()

    def install(self, environment: Environment, *arguments: str) -> None:
        """Run `pip install` in the environment."""
        self.run(environment, [str(environment.python), *PIP_INSTALL, *arguments])

    def run(self, environment: Environment, command: "list[str]") -> None:
        """Run a command to its end.

        Raises:
            SetupError: it failed; the line has the log's path and the command's own error.
        """
        hidden = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        variables.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_WARN_SCRIPT_LOCATION="1")
        started = time.monotonic()
        with environment.log.open("a") as log:
            with self._guard:
                if self._stopped:
                    raise SetupError(f"{environment.name} was not finished")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    pass_fds=(self._lock,),
                )
                self._running.append(process)
            code = process.wait()
            self._running.remove(process)
            log.write(f"{' '.join(command)}: exit code {code} after {time.monotonic() - started:.1f} s\n")
        if code != 0:
            raise SetupError(
                f"installing {environment.name} ended with exit code {code}: {last_error(environment.log)}; "
                f"log: {environment.log}"
            )


def last_error(log: Path) -> str:
    """The line of a log that says most about the failure."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    remark = "; the package index did not answer" if any("Retrying (" in line for line in lines) else ""
    return (errors or lines or ["no output"])[-1][:300] + remark


def read_json(path: Path) -> "dict | None":
    """The content of a marker, or None where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: dict) -> None:
    """Write a marker in one step that survives a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as handle:
        json.dump(content, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
