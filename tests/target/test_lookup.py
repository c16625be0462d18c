"""A target that is here in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import TargetError
from eagle3_core.target.files import NOT_HERE
from eagle3_core.target.info import inspect_target
from eagle3_core.target.lookup import look_up_target
from tests.target.files import LLAMA, LLAMA_FILES, write_sharded

FIRST, MIDDLE, LAST = LLAMA_FILES


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "target", LLAMA, LLAMA_FILES)


def config(folder: Path) -> RunConfig:
    return parse_config({"name": "x", "target": {"model": str(folder)}, "workspace": str(folder / "w")})


def test_a_whole_target_has_the_fingerprint_that_runs_use(target: Path) -> None:
    info, note = look_up_target(config(target))
    assert info == inspect_target(target)
    assert note is None
    assert not info.fingerprint.startswith("headers:")


def test_missing_weight_files_are_named_and_the_rest_is_known(target: Path) -> None:
    (target / FIRST).unlink()
    (target / MIDDLE).unlink()
    info, note = look_up_target(config(target))
    assert info.missing_files == (FIRST, MIDDLE)
    assert note == "2 of the weight files that its index names are missing"
    assert (info.embedding.file, info.embedding.dtype, info.embedding.shape) == (FIRST, NOT_HERE, ())
    assert (info.lm_head.file, info.lm_head.shape) == (LAST, (16, 8))
    assert info.vocab_size == 16
    assert info.num_parameters is None


def test_a_run_refuses_a_target_that_is_here_in_part_and_names_the_files(target: Path) -> None:
    (target / MIDDLE).unlink()
    with pytest.raises(TargetError, match=rf"lacks 1 of the weight files.*{MIDDLE}.*fetch the target whole"):
        inspect_target(target)


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.gguf", None])
def test_a_target_without_safetensors_weights_is_refused_with_what_was_found(
    target: Path, weights: str | None
) -> None:
    for file in target.glob("*.safetensors*"):
        file.unlink()
    if weights:
        (target / weights).write_bytes(b"")
    with pytest.raises(TargetError, match=weights or "point target.model to a full model") as caught:
        look_up_target(config(target))
    assert "has no safetensors weights" in str(caught.value)
    assert "\n" not in str(caught.value)
