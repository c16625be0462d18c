"""Captures as other projects' folders and back: the same states, and what does not fit is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file, save_file

from eagle3_core.capture import export_folder, extract, import_folder, verify
from eagle3_core.config import RunConfig, Stage, parse_config
from eagle3_core.contracts import ExportCaptureSpec, ForeignFormat, ImportResult, ImportSpec, StepSpec
from eagle3_core.data import prepare
from eagle3_core.errors import ConfigError, DataError, Eagle3Error, TargetError
from eagle3_core.host.engine_info import EngineVersions
from eagle3_core.identity import plan_verification
from eagle3_core.planning import RunPlan, plan_artifacts, plan_imported
from eagle3_core.step import Progress
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.store.shards import CapturedSample, ShardReader
from eagle3_core.target.info import inspect_target
from eagle3_core.training import train
from tests.capture.runs import capture_folder, capture_spec, make_samples
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

PROGRESS = Progress("import_capture")
V1, CURRENT = "speculators-v1", "speculators"
FORMATS = [V1, CURRENT]
SAMPLES = make_samples([12, 20, 9, 16])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> StepSpec:
    """A capture of four samples in two shards, final states of the rows that a loss reads."""
    root = tmp_path_factory.mktemp("made")
    target = make_tiny_target(root / "target")
    capture = {"engine": "reference", "shard_bytes": 60 << 10}
    spec = capture_spec(root, target, SAMPLES, capture=capture)
    extract.run(spec, Progress("extract"))
    return spec


@pytest.fixture(scope="module")
def exported(made: StepSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The capture in each format."""
    root = tmp_path_factory.mktemp("exported")
    for form in FORMATS:
        export_to(made, root / form, form)
    return {form: root / form for form in FORMATS}


def export_to(made: StepSpec, folder: Path, form: str) -> None:
    spec = ExportCaptureSpec(
        config=made.config, capture=made.outputs["capture"].ref, folder=str(folder), format=form
    )
    found = export_folder.run(spec, PROGRESS)
    assert found.num_samples == len(SAMPLES)


def import_from(
    made: StepSpec, folder: Path, form: ForeignFormat, store: Path, **fields: Any
) -> tuple[ImportResult, LocalStore]:
    target = fields.pop("target", {})
    config = made.config.model_copy(
        update={"store": str(store), "target": made.config.target.model_copy(update=target)}
    )
    spec = ImportSpec(config=config, target_path=made.target_path, folder=str(folder), format=form, **fields)
    return import_folder.run(spec, PROGRESS), LocalStore(store)


def stored(folder: Path) -> dict[str, CapturedSample]:
    return {one.key: one for path in sorted(folder.glob("*.safetensors")) for one in ShardReader(path)}


@pytest.mark.parametrize("form", FORMATS)
def test_a_capture_that_goes_out_and_comes_back_has_the_same_states_and_passes_the_meaning_check(
    made: StepSpec, exported: dict[str, Path], tmp_path: Path, form: ForeignFormat
) -> None:
    result, store = import_from(made, exported[form], form, tmp_path / "store")
    before, after = stored(capture_folder(made)), stored(store.folder(result.capture))
    assert list(after) == [sample.key for sample in SAMPLES]
    for key, sample in before.items():
        for name in ("input_ids", "loss_mask", "aux_states", "final_states", "final_rows"):
            assert torch.equal(getattr(after[key], name), getattr(sample, name))
    back = read_dataset(store.fetch(result.dataset))
    assert [(s.key, s.split, s.prompt_length) for s in back] == [
        (s.key, s.split, s.prompt_length) for s in SAMPLES
    ]
    manifest = store.read(result.capture)
    assert manifest.identity["engine"] == f"imported {form}"
    assert manifest.parents["dataset"] == result.dataset
    assert store.is_intact(result.capture)
    again, _ = import_from(made, exported[form], form, tmp_path / "store")
    assert (again.capture, again.num_new_shards, result.num_new_shards) == (result.capture, 0, 2)
    config = made.config.model_copy(update={"store": str(tmp_path / "store")})
    checked = StepSpec(
        config=config, run_id="r", target_path=made.target_path,
        outputs={"verification": plan_verification(config, result.capture)},
        inputs={"dataset": result.dataset, "capture": result.capture},
    )  # fmt: skip
    assert verify.run(checked, PROGRESS).agreement == 1.0


def test_a_profile_that_names_an_imported_capture_trains_on_it(
    made: StepSpec, exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(exported[V1], tmp_path / "folder")
    for path in folder.glob("data_*.pt"):
        document = torch.load(path, weights_only=True)
        del document["split"]
        torch.save(document, path)
    data = {"heldout_fraction": 0.5, "min_trainable_tokens": 2}
    sections = {"store": str(tmp_path / "store"), "train": {"num_epochs": 1, "pack_tokens": 64}}
    config = RunConfig.model_validate(made.config.model_dump() | sections | {"data": data})
    spec = ImportSpec(config=config, target_path=made.target_path, folder=str(folder), format=V1)
    imported = import_folder.run(spec, PROGRESS)
    store, versions = open_store(config), EngineVersions(python="3.11", packages={"vllm": "0"})
    info = inspect_target(Path(made.target_path))

    def planned(capture: str) -> RunPlan:
        changed = RunConfig.model_validate(config.model_dump() | {"data": data | {"capture": capture}})
        plans = plan_artifacts(changed, info, versions, store)
        return RunPlan(changed, Path(made.target_path), info, versions, store, plans)

    plan = planned(str(imported.capture))
    assert (plan.artifacts["dataset"].ref, plan.artifacts["capture"].ref) == (
        imported.dataset, imported.capture,
    )  # fmt: skip

    def step(stage: Stage) -> StepSpec:
        return StepSpec(
            config=plan.config,
            run_id="r",
            target_path=made.target_path,
            outputs={str(kind): one for kind, one in plan.outputs(stage).items()},
            inputs={str(kind): ref for kind, ref in plan.inputs(stage).items()},
        )

    prepared = prepare.run(step("prepare"), PROGRESS)
    assert (prepared.num_kept, prepared.num_train, prepared.num_heldout) == (4, 2, 2)
    assert store.is_intact(plan.outputs("extract")["capture"].ref)
    assert verify.run(step("verify"), PROGRESS).agreement == 1.0
    assert train.run(step("train"), PROGRESS).num_steps > 0
    changed = config.model_copy(update={"capture": config.capture.model_copy(update={"shard_bytes": 8192})})
    with pytest.raises(ConfigError, match=r"imported with other settings .*shard_bytes"):
        plan_imported(changed, info, store, str(imported.capture))
    own = LocalStore(made.config.store_path)
    with pytest.raises(ConfigError, match=r"which was not imported; leave data.capture out"):
        plan_imported(made.config, info, own, str(made.outputs["capture"].ref))
    with pytest.raises(ConfigError, match="limit takes fewer prompts"):
        parse_config(plan.config.model_dump() | {"limit": 4})


def test_the_exported_folders_are_what_their_projects_read(made: StepSpec, exported: dict[str, Path]) -> None:
    first = stored(capture_folder(made))["sample-000"]
    v1 = torch.load(exported[V1] / "data_0.pt", weights_only=True)
    assert [tuple(layer.shape) for layer in v1["hidden_states"]] == [(12, 128)] * 4
    assert torch.equal(v1["hidden_states"][1], first.aux_states[:, 1])
    assert torch.equal(v1["hidden_states"][-1][first.final_rows], first.final_states)
    assert '"layer_ids": [\n  1,\n  3,\n  4,\n  7\n ]' in (exported[V1] / "data_config.json").read_text()
    rows = load_from_disk(str(exported[CURRENT]))
    assert list(rows.with_format(None)["seq_len"]) == [len(sample) for sample in SAMPLES]
    files = load_file(exported[CURRENT] / "hidden_states" / "hs_1.safetensors")
    assert torch.equal(files["token_ids"], rows[1]["input_ids"])
    assert rows[1]["loss_mask"].tolist() == SAMPLES[1].loss_mask.tolist()
    assert files["hidden_states"].shape == (20, 4, 128)


def test_the_trainer_of_speculators_reads_the_exported_folder(exported: dict[str, Path]) -> None:
    data = pytest.importorskip("speculators.train.data")
    rows = data.ArrowDataset(64, exported[CURRENT], on_missing="raise", hidden_states_dtype=torch.float32)
    assert len(rows) == len(SAMPLES)
    assert rows[2]["hidden_states"].shape == (9, 3 * 128)
    assert rows[2]["loss_mask"].tolist() == SAMPLES[2].loss_mask.tolist()


def copy(source: Path, place: Path) -> Path:
    shutil.copytree(source, place)
    return place


def edit_v1(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        document = torch.load(folder / "data_1.pt", weights_only=True)
        change(document)
        torch.save(document, folder / "data_1.pt")

    return apply


def edit_states(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "hidden_states" / "hs_1.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    return apply


def cut(name: str) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        document[name] = document[name][:-1]

    return apply


def to_bf16(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"].bfloat16()


REFUSED = {
    "a row is missing": (V1, lambda f: (f / "data_2.pt").unlink(), "lacks 1 of 4 rows: 2"),
    "a row is there twice": (V1, lambda f: shutil.copy(f / "data_2.pt", f / "data_02.pt"), "both row 2"),
    "no files": (V1, lambda f: [path.unlink() for path in f.glob("*.pt")], "no file named like"),
    "fewer mask entries": (V1, edit_v1(cut("loss_mask")), r"data_1.pt has \[20\] token ids and a loss mask"),
    "fewer ids": (V1, edit_v1(cut("input_ids")), r"data_1.pt has \[19\] token ids"),
    "fewer layers": (V1, edit_v1(cut("hidden_states")), r"shape \[20, 3, 128\]"),
    "an id too large": (V1, edit_v1(lambda d: d["input_ids"].fill_(10_000)), "token id 10,000"),
    "a mask that is none": (V1, edit_v1(lambda d: d.update(loss_mask=d["input_ids"])), "other values than 0"),
    "something else": (V1, edit_v1(lambda d: d.pop("hidden_states")), "expected a dictionary with"),
    "a file that was cut": (
        V1,
        lambda f: (f / "data_1.pt").write_bytes((f / "data_1.pt").read_bytes()[:99]),
        r"data_1\.pt cannot be read",
    ),
    "a file of states less": (
        CURRENT, lambda f: (f / "hidden_states" / "hs_3.safetensors").unlink(), "has 3 files, the dataset"
    ),
    "a file of states missing": (
        CURRENT, lambda f: (f / "hidden_states" / "hs_1.safetensors").unlink(), "lacks 1 of 4 rows: 1"
    ),
    "states of other tokens": (
        CURRENT, edit_states(lambda t: t["token_ids"].add_(1)), "hs_1.* not those of row 1"
    ),
    "states of fewer tokens": (
        CURRENT, edit_states(cut("hidden_states")), r"shape \[19, 4, 128\]; expected"
    ),
    "another dtype": (CURRENT, edit_states(to_bf16), "states in bfloat16; expected float32"),
    "no dataset beside": (CURRENT, lambda f: (f / "state.json").unlink(), "no dataset that can be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
    made: StepSpec, exported: dict[str, Path], tmp_path: Path, name: str
) -> None:
    form, damage, message = REFUSED[name]
    folder = copy(exported[form], tmp_path / "folder")
    damage(folder)
    with pytest.raises(DataError, match=message) as error:
        import_from(made, folder, form, tmp_path / "store")  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert (
        not list((tmp_path / "store").glob("capture/*/*.safetensors"))
        or "shape" in str(error.value)
        or ("dtype" in str(error.value))
    )


@pytest.mark.parametrize(
    ("form", "layers", "error", "message"),
    [
        (V1, (1, 3, 4, 8), TargetError, "no layer 8; expected layers from 0 to 7"),
        (V1, (2, 4, 5, 7), DataError, r"capture ids \[3, 5, 6, 8\]; expected \[2, 4, 5, 8\] of the profile"),
        (CURRENT, (2, 4, 5, 9), TargetError, "no capture id 9"),
        (CURRENT, (1, 3, 4, 7), DataError, "set target.aux_layer_ids"),
    ],
)
def test_layers_that_the_target_or_the_profile_does_not_have_are_refused(
    made: StepSpec,
    exported: dict[str, Path],
    tmp_path: Path,
    form: ForeignFormat,
    layers: tuple[int, ...],
    error: type[Eagle3Error],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        import_from(made, exported[form], form, tmp_path / "store", layer_ids=layers)


def test_a_folder_without_names_and_splits_gets_keys_by_row_and_a_share_held_out(
    made: StepSpec, exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(exported[V1], tmp_path / "folder")
    (folder / "data_config.json").unlink()
    for path in folder.glob("*.pt"):
        document = torch.load(path, weights_only=True)
        torch.save({name: document[name] for name in ("input_ids", "loss_mask", "hidden_states")}, path)
    result, store = import_from(made, folder, V1, tmp_path / "store", layer_ids=(1, 3, 4, 7))  # type: ignore[arg-type]
    samples = read_dataset(store.fetch(result.dataset))
    assert [sample.key for sample in samples] == [f"row-{row:07d}" for row in range(4)]
    assert sorted(sample.split for sample in samples) == ["heldout", "train", "train", "train"]


def test_final_states_that_were_not_exported_are_not_taken_for_states(
    made: StepSpec, exported: dict[str, Path], tmp_path: Path
) -> None:
    everything = made.config.capture.model_copy(update={"final_state": "all"})
    wide = made.model_copy(update={"config": made.config.model_copy(update={"capture": everything})})
    with pytest.raises(DataError, match=r"no final state for 6 rows, first for 0; set capture\.final_state"):
        import_from(wide, exported[V1], V1, tmp_path / "store")  # type: ignore[arg-type]


def test_an_export_into_a_folder_with_files_is_refused(made: StepSpec, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(DataError, match="is not empty"):
        export_to(made, tmp_path, V1)
