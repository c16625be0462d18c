"""Checks of one artifact: every kind of damage to a file, and what the step says of a capture."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core import checking
from eagle3_core.checking import ArtifactCheck, check_files, check_states, making_config
from eagle3_core.errors import ConfigError, StepError, StoreError
from eagle3_core.host.run_folder import create_run_folder
from eagle3_core.identity import plan_capture, plan_imported_dataset
from eagle3_core.pipeline import run_stage
from eagle3_core.planning import plan_run
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import LocalStore
from tests.doubles.profile import stand_in_config
from tests.store.artifacts import add, add_run

pytestmark = pytest.mark.orchestrator


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_an_artifact_of_any_kind_is_checked_without_an_engine(store):
    run = add_run(store, "a", age_days=1)
    for ref in run.refs:
        check = check_files(store, ref)
        assert (check.is_right, check.num_files, check.bytes) == (True, 1, 10)
        assert check.meaning == ("not asked" if ref.kind == "capture" else "no capture")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"x" * 9), "has 9 bytes, its manifest says 10"),
        (lambda path: path.write_bytes(b"x" * 10), "does not match its hash"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(store, damage, says):
    ref = add_run(store, "a", age_days=1).export
    damage(store.folder(ref) / "content.bin")
    seen: list[str] = []
    check = check_files(store, ref, on_file=lambda entry: seen.append(entry.path))
    assert not check.is_right
    assert [problem.where for problem in check.problems] == seen == ["content.bin"]
    assert says in check.problems[0].problem


def test_what_is_not_complete_or_not_there_is_not_right(store):
    partial = add(store, "capture", {"target": "t"}, complete=False)
    assert check_files(store, partial.ref).problems[0].problem == "the artifact is not complete"
    with pytest.raises(StoreError, match="is not in"):
        check_files(store, add_run(LocalStore(store.root / "other"), "a", age_days=1).export)


def test_a_file_that_no_manifest_names_is_told_and_harms_nothing(store):
    ref = add_run(store, "a", age_days=1).export
    (store.folder(ref) / "stranger").write_text("?")
    check = check_files(store, ref)
    assert (check.is_right, check.unnamed_files) == (True, ("stranger",))


class Scene:
    """A capture of the stand-in engine, with a fault of its step `verify`."""

    def __init__(self, folder: Path, fault: dict[str, str] | None = None) -> None:
        self.config = stand_in_config(folder, fault)
        self.run = create_run_folder(self.config, ("prepare", "extract"), "r")
        for stage in ("prepare", "extract"):
            run_stage(stage, self.config, "r")
        self.plan = plan_run(self.config)
        self.store, self.ref = self.plan.store, self.plan.artifacts["capture"].ref

    def check(self, **given: object) -> ArtifactCheck:
        files = check_files(self.store, self.ref)
        config = making_config(self.store, self.ref, self.config.workspace_path)
        return check_states(files, self.store, self.ref, config, **given)  # type: ignore[arg-type]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's shards are no shards."""
    monkeypatch.setattr(checking, "_size_problems", lambda plan, manifest: [])


def test_the_states_are_checked_by_the_step_with_the_configuration_of_the_run(tmp_path, any_size):
    scene = Scene(tmp_path)
    check = scene.check()
    assert (check.meaning, check.is_right) == ("right", True)
    assert check.findings["num_rows_checked"] == 20
    assert scene.store.find(scene.plan.artifacts["verification"].ref) is not None
    assert not list((scene.config.store_path / "uses").glob("verify-*"))
    deep = scene.check(deep=True)
    assert deep.meaning == "right"
    assert len([ref for ref in scene.store.refs() if ref.kind == "verification"]) == 2


def test_bad_samples_are_listed_one_by_one(tmp_path, any_size):
    check = Scene(tmp_path, {"step": "verify", "kind": "bad_states"}).check()
    assert (check.meaning, check.is_right) == ("wrong", False)
    assert [(problem.where, problem.problem) for problem in check.problems] == [
        ("k7 in shard-00003.safetensors", "capture id 4 has 1 NaN and 0 Inf")
    ]


def test_a_step_that_could_not_check_is_no_verdict(tmp_path, any_size):
    with pytest.raises(StepError):
        Scene(tmp_path, {"step": "verify", "kind": "exit"}).check()


def test_an_imported_capture_is_checked_with_its_own_dataset_by_the_profile_that_fits(tmp_path, any_size):
    config = stand_in_config(tmp_path)
    plan = plan_run(config)
    dataset = plan_imported_dataset(plan.target, "imported speculators", "theirs")
    capture = plan_capture(config, plan.target, dataset.ref, "theirs", "imported speculators")
    for one in (dataset, capture):
        with plan.store.writer(one) as writer:
            write_atomic(writer.folder / "file", one.kind)
            writer.complete([writer.folder / "file"])
    files = check_files(plan.store, capture.ref)
    check = check_states(files, plan.store, capture.ref, config)
    assert (check.meaning, check.is_right) == ("right", True)
    (verification,) = (one for one in plan.store.list() if one.ref.kind == "verification")
    assert verification.parents == {"capture": capture.ref}
    with pytest.raises(ConfigError, match="name it with --profile"):
        making_config(plan.store, capture.ref, tmp_path)
    other = config.model_copy(update={"capture": config.capture.model_copy(update={"final_state": "all"})})
    with pytest.raises(ConfigError, match=f"makes capture/.*expected {capture.ref}"):
        check_states(files, plan.store, capture.ref, other)


def test_written_bytes_are_held_against_the_planned_ones(tmp_path):
    check = Scene(tmp_path).check()
    assert (check.meaning, check.is_right) == ("not checked", False)
    assert any("planned" in problem.problem for problem in check.problems)


def test_without_the_run_folder_a_profile_must_be_named_and_it_must_be_the_right_one(tmp_path):
    scene = Scene(tmp_path)
    files = check_files(scene.store, scene.ref)
    with pytest.raises(ConfigError, match="--profile, or check the files alone with --files-only"):
        making_config(scene.store, scene.ref, tmp_path / "elsewhere")
    capture = scene.config.capture.model_copy(update={"final_state": "all"})
    other = scene.config.model_copy(update={"capture": capture})
    with pytest.raises(ConfigError, match=rf"makes capture/.*expected {scene.ref}"):
        check_states(files, scene.store, scene.ref, other)
