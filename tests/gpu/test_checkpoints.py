"""Checkpoints of a training on a GPU: pinned copies, exact resume, utilisation; how long a save blocks it.

`python -m pytest -s -m gpu tests/gpu/test_checkpoints.py` in an environment with torch's CUDA build.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.host.inspect import GIB
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.training import train
from eagle3_core.training.background import BackgroundSaver
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.flops import peak_flops
from eagle3_core.training.snapshot import HostCopy
from tests.tiny import make_tiny_target
from tests.training.examples import make_samples
from tests.training.runs import SAVE_ALWAYS, Quiet, folder_of, records_of, run_killed, spec_of

pytestmark = [pytest.mark.engine, pytest.mark.gpu]
PLAN = ArtifactPlan(kind="checkpoint", identity={"for": "a test"})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    folder = tmp_path_factory.mktemp("tiny")
    return inspect_target(
        make_tiny_target(folder, num_layers=4, hidden_size=128, vocab_size=300, tokenizer_size=290)
    )


def test_a_copy_is_pinned_and_stays_what_it_was_when_the_gpu_goes_on() -> None:
    live = {"a": torch.full((1 << 26,), 1.0, device="cuda"), "count": torch.tensor(3.0)}
    copy = HostCopy().take(live)
    live["a"].fill_(2.0)
    torch.cuda.synchronize()
    assert copy["a"].is_pinned()
    assert bool(copy["a"].eq(1.0).all())
    assert float(copy["count"]) == 3.0


def test_a_save_blocks_training_for_the_copy_alone(tmp_path: Path) -> None:
    """Six GiB, about the state of a draft for an 8B target."""
    state = {"parameters": {str(n): torch.ones(GIB // 4, device="cuda") for n in range(6)}}
    with BackgroundSaver(ResumeFolder(tmp_path, PLAN)) as saver:
        blocked = []
        for step in range(3):
            started = time.monotonic()
            saver.save(state, step)
            blocked.append(time.monotonic() - started)
            saver.wait()
            whole = time.monotonic() - started
    print(f"\n6 GiB: blocked {', '.join(f'{each:.2f}' for each in blocked)} s, written after {whole:.2f} s")
    assert blocked[-1] < 0.5 * whole


def test_a_training_that_was_killed_goes_on_as_if_it_had_not(tmp_path: Path, target: TargetInfo) -> None:
    sections = {
        "train": {"num_epochs": 2, "checkpoint_every_seconds": SAVE_ALWAYS},
        "engine": {"device": "cuda"},
    }
    specs = []
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        specs.append(spec_of(tmp_path / name, target, make_samples(target), **sections))
    straight, killed = specs
    result = train.run(straight, Quiet())  # type: ignore[arg-type]
    run_killed(killed, result.num_steps // 2 + 2, tmp_path / "killed")
    resumed = train.run(killed, Quiet())  # type: ignore[arg-type]
    assert resumed.resumed_from_step is not None
    ours, theirs = records_of(killed, "step"), records_of(straight, "step")
    assert [record["samples"] for record in ours] == [record["samples"] for record in theirs]
    for record, wanted in zip(ours, theirs, strict=True):
        assert record["learning_rate"] == wanted["learning_rate"]
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    a, b = (load_file(folder_of(each) / "model.safetensors") for each in (killed, straight))
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=1e-5) for name in b)


def test_utilisation_is_known_where_the_device_is(tmp_path: Path, target: TargetInfo) -> None:
    spec = spec_of(tmp_path, target, train={"compute_dtype": "bfloat16"}, engine={"device": "cuda"})
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    assert result.peak_memory_bytes
    if peak_flops(torch.cuda.get_device_name(), "bfloat16") is None:
        assert result.mfu is None
    else:
        assert result.mfu is not None
        assert 0 < result.mfu < 1
