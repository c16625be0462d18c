"""Both trainers on a small synthetic capture: equal beginnings, learning, and the figures that are left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import train_quality

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def compared(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> dict[str, Any]:
    """Figures of a run on the tiny capture."""
    monkeypatch.setattr("sys.argv", ["train_quality", "--tiny", "--json", str(file), *options])
    train_quality.main()
    return json.loads(file.read_text())


def test_both_trainers_take_the_same_steps_and_ours_learns_no_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "12", "--evaluations", "2", "--set", "train.compute_dtype=float32"]
    found = compared(monkeypatch, tmp_path / "found.json", *options)
    run = found["runs"][0]
    theirs, ours = run["speculators"], run["ours"]
    assert len(theirs["losses"]) == 12
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-4)
    assert [look["step"] for look in ours["evaluations"]] == [0, 6, 12]
    for mine, other in zip(ours["evaluations"], theirs["evaluations"], strict=True):
        assert mine["heldout_loss"] == pytest.approx(other["heldout_loss"], rel=1e-4)
    first, last = ours["evaluations"][0], ours["evaluations"][-1]
    assert last["acceptance_length"] > first["acceptance_length"] + 0.05
    assert found["gains"]["ours - speculators"][0] == pytest.approx(0.0, abs=0.02)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.lstrip()[:1].isdigit()] == ["0", "6", "12"]


def test_a_trained_head_and_the_acceptance_loss_are_trained_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "4", "--evaluations", "1", "--seeds", "3", "4"]
    found = compared(
        monkeypatch, tmp_path / "a.json", *options, "--trainers", "ours", "trained head", "acceptance loss"
    )
    assert found["seeds"] == [3, 4]
    for run in found["runs"]:
        ours, head, acceptance = run["ours"], run["trained head"], run["acceptance loss"]
        assert head["losses"][0] == ours["losses"][0]
        assert head["losses"][-1] < ours["losses"][-1]
        assert acceptance["losses"][0] < ours["losses"][0]
    assert found["gains"].keys() == {"trained head - ours", "acceptance loss - ours"}
    assert "(2 seeds, standard deviation" in capsys.readouterr().out


def test_documents_and_padding_are_kept_apart_in_a_batch_of_speculators() -> None:
    import torch

    from benchmarks.quality_trainers import speculators_batch
    from eagle3_core.training.rows import plan_rows
    from eagle3_core.training.ttt import Pack

    mask = torch.tensor([0, 1, 0, 1, 1], dtype=torch.bool)
    pack = Pack(
        keys=("a", "b"),
        input_ids=torch.tensor([5, 6, 7, 8, 9]),
        aux_states=torch.ones(5, 6),
        positions=torch.tensor([1, 2, 1, 2, 3]),
        final_states=torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]),
        plan=plan_rows([2, 3], mask.numpy(), 2),
    )
    batch = speculators_batch(pack, num_rows=7)
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1, -1, -1]]
    assert batch["loss_mask"].int().tolist() == [[0, 1, 0, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[1, 2, 1, 2, 3, 0, 0]]
    assert batch["verifier_last_hidden_states"][0, :, 0].tolist() == [0, 1, 0, 2, 3, 0, 0]
    assert batch["hidden_states"].shape == (1, 7, 6)


def test_a_run_of_a_workspace_and_a_capture_of_a_store_are_the_same_inputs(tmp_path: Path) -> None:
    from benchmarks.quality_inputs import TRAIN_SPEC, inputs_of_capture, inputs_of_run
    from benchmarks.tiny_capture import PROFILE, tiny_config, write_tiny_capture
    from eagle3_core.contracts import StepSpec

    config = tiny_config(tmp_path)
    refs = write_tiny_capture(tmp_path)
    for run_id in ("20300101-a", "20300102-b"):
        spec = StepSpec(
            config=config, run_id=run_id, target_path=config.target.model, outputs={}, inputs=refs
        )
        file = tmp_path / "workspace" / "runs" / run_id / TRAIN_SPEC
        file.parent.mkdir(parents=True)
        file.write_text(spec.model_dump_json())
        (file.parent.parent / "config.yaml").write_text((tmp_path / PROFILE).read_text())
    (file.parent.parent.parent / "20300103-not-trained" / "logs").mkdir(parents=True)
    settings = ["train.seed=7", "workspace=unused"]
    newest = inputs_of_run(tmp_path / "workspace", None, settings[:1])
    named = inputs_of_capture(str(tmp_path / PROFILE), None, refs["capture"].id, None, settings)
    assert newest.config.workspace_path == tmp_path / "workspace"
    assert newest.config.train == named.config.train
    assert newest.config.train.seed == 7
    assert newest.index.splits == named.index.splits
    assert len(newest.index.splits["train"]) == 48


def test_a_workspace_without_a_trained_run_and_a_capture_that_does_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train_quality", "--workspace", str(tmp_path)])
    with pytest.raises(SystemExit):
        train_quality.main()
    assert "expected one with logs/train.spec.json" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["train_quality", "--tiny", "--set", "draft.vocab_size=40"])
    with pytest.raises(SystemExit):
        train_quality.main()
    assert "(draft, target): (80, 96); expected (40, 96)" in capsys.readouterr().err
