"""The exported folder: what is written, that it is checked, and that it is the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.contracts import StepSpec
from eagle3_core.errors import ExportError
from eagle3_core.identity import STEP_VERSION
from eagle3_core.serving import export
from eagle3_core.serving.draft import FLAGS
from eagle3_core.serving.vllm_format import check_loadable
from eagle3_core.store.files import hash_file
from eagle3_core.target.weights import read_embedding
from tests.serving.drafts import (
    AUX_IDS,
    Factory,
    draft_config,
    identity_vocabulary,
    make_factory,
    scattered_vocabulary,
    silent,
    untrained_weights,
)
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

DRAFT_SIZE = 64


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    folder = tmp_path_factory.mktemp("export")
    return make_factory(folder, make_tiny_target(folder / "target", num_layers=4, tied=True))


@pytest.fixture(scope="module")
def checkpoint(factory: Factory) -> ArtifactRef:
    return _add(factory, "plain", norm_before_residual=True)


@pytest.fixture(scope="module")
def exported(factory: Factory, checkpoint: ArtifactRef) -> Path:
    spec = factory.export_spec(checkpoint)
    export.run(spec, silent())
    return _folder(factory, spec)


def test_every_weight_is_the_checkpoint_in_bf16_and_nothing_is_missing_or_extra(
    factory: Factory, checkpoint: ArtifactRef, exported: Path
) -> None:
    trained = load_file(factory.store.folder(checkpoint) / "model.safetensors")
    written = load_file(exported / "model.safetensors")

    assert written.keys() - trained.keys() == {"d2t", "t2d"}
    assert not trained.keys() - written.keys()
    assert all(torch.equal(written[name], trained[name].bfloat16()) for name in trained)


def test_the_mapping_is_that_of_the_vocabulary_artifact(factory: Factory, exported: Path) -> None:
    written, mapping = load_file(exported / "model.safetensors"), _mapping(factory)

    assert written["d2t"].shape == (64,)
    assert written["t2d"].shape == (512,)
    assert torch.equal(written["d2t"], mapping["d2t"])
    assert torch.equal(written["t2d"], mapping["t2d"])


def test_the_configuration_leaves_nothing_to_an_engine_s_default(factory: Factory, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())

    assert {flag: config[flag] for flag in FLAGS} == {
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (64, 128)
    layer = config["transformer_layer_config"]
    assert (layer["vocab_size"], layer["tie_word_embeddings"]) == (512, False), "the target's ties embeddings"
    assert config["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": factory.target.path,
    }


def test_the_export_of_a_fixed_draft_changes_only_with_its_step_version(factory: Factory) -> None:
    """Golden output: when this fails and the change is meant, raise `STEP_VERSION["export"]` too."""
    config = draft_config(factory.target, DRAFT_SIZE, fc_norm=True)
    weights = untrained_weights(config, factory.target, _mapping(factory)["t2d"])
    for tensor in weights.values():
        tensor.copy_((torch.arange(tensor.numel()) % 251).view(tensor.shape) / 256)
    spec = factory.export_spec(factory.add_checkpoint(config, weights, _mapping(factory), "golden"))
    export.run(spec, silent())
    folder = _folder(factory, spec)
    document = json.loads((folder / "config.json").read_text())
    document["speculators_config"].pop("verifier")
    document.pop("speculators_version")
    (folder / "config.json").write_text(json.dumps(document, sort_keys=True))
    hashes = [hash_file(folder / name) for name in ("model.safetensors", "config.json")]
    assert (STEP_VERSION["export"], *hashes) == (
        1,
        "ec7d967e564a2298dc03052f91a3cd84",
        "04eacf5b4eb3f3a694a39c86c313aba6",
    )


def test_two_exports_have_the_same_hashes(
    tmp_path: Path, factory: Factory, checkpoint: ArtifactRef, exported: Path
) -> None:
    first = {path.name: hash_file(path) for path in exported.iterdir()}
    for path in exported.iterdir():
        path.unlink()

    export.run(factory.export_spec(checkpoint), silent())

    assert {path.name: hash_file(path) for path in exported.iterdir()} == first


def test_the_embedding_is_the_target_s_bit_for_bit_and_costs_its_own_bytes(
    factory: Factory, checkpoint: ArtifactRef, exported: Path
) -> None:
    spec = factory.export_spec(checkpoint, export={"include_embedding": True})
    export.run(spec, silent())

    path = _folder(factory, spec) / "model.safetensors"
    embedding = load_file(path)["embed_tokens.weight"]
    assert torch.equal(embedding, read_embedding(factory.target))
    assert embedding.dtype == torch.float32, "the target's dtype"
    payload = path.stat().st_size - _header_bytes(path)
    without = exported / "model.safetensors"
    assert payload - (without.stat().st_size - _header_bytes(without)) == 512 * 128 * 4


def test_a_draft_with_the_whole_vocabulary_ships_no_mapping(factory: Factory) -> None:
    spec = factory.export_spec(_add(factory, "whole", draft_size=512))

    export.run(spec, silent())

    assert not {"d2t", "t2d"} & load_file(_folder(factory, spec) / "model.safetensors").keys()


def test_a_file_with_a_mapping_of_the_whole_vocabulary_is_refused(factory: Factory, tmp_path: Path) -> None:
    spec = factory.export_spec(_add(factory, "whole", draft_size=512))
    export.run(spec, silent())
    folder = _copy(_folder(factory, spec), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | identity_vocabulary(factory.target), folder / "model.safetensors")

    with pytest.raises(ExportError, match="d2t does not belong there"):
        check_loadable(folder, factory.target, AUX_IDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None, "t2d": None}, "lacks d2t, t2d"),
        ({"d2t": torch.zeros(64, dtype=torch.int64)}, "d2t does not lead to"),
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"verifier_norm.weight": torch.ones(128)}, "verifier_norm.weight does not belong there"),
        ({"norm.weight": torch.full((128,), torch.nan)}, "norm.weight is not finite"),
        ({"embed_tokens.weight": torch.ones(500, 128)}, "embed_tokens.weight has shape"),
    ],
)
def test_damaged_weights_are_refused(
    factory: Factory, exported: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = _copy(exported, tmp_path)
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")

    with pytest.raises(ExportError, match=message):
        check_loadable(folder, factory.target, AUX_IDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": None}, "does not say eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, r"is \(2, 3, 4\) instead of \(1, 2, 3\)"),
        ({"norm_before_residual": None}, "does not say norm_before_residual"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64 instead of 128"),
        ({"speculators_model_type": "eagle"}, "describes eagle over llama"),
    ],
)
def test_a_changed_configuration_is_refused(
    factory: Factory, exported: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = _copy(exported, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ExportError, match=message):
        check_loadable(folder, factory.target, AUX_IDS)


def test_a_draft_of_another_width_than_the_target_is_refused(factory: Factory) -> None:
    checkpoint = _add(factory, "narrow", hidden_size=64)

    with pytest.raises(ExportError, match="hidden_size is 64 instead of 128"):
        export.run(factory.export_spec(checkpoint), silent())


def test_a_checkpoint_of_other_layers_than_the_run_s_is_refused(factory: Factory) -> None:
    checkpoint = _add(factory, "layers", aux_ids=(0, 2, 3))

    with pytest.raises(
        ExportError, match=r"trained on the auxiliary layer ids \[0, 2, 3\]; expected \[1, 2, 3\]"
    ):
        export.run(factory.export_spec(checkpoint), silent())


def test_a_checkpoint_with_another_mapping_than_its_vocabulary_is_refused(factory: Factory) -> None:
    mapping = _mapping(factory)
    other = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": mapping["t2d"]}
    checkpoint = _add(factory, "mapping", extra=other)

    with pytest.raises(ExportError, match=r"d2t of the checkpoint .* differs from the vocabulary"):
        export.run(factory.export_spec(checkpoint), silent())


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(factory: Factory) -> None:
    checkpoint = _add(factory, "damaged")
    path = factory.store.folder(checkpoint) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    spec = factory.export_spec(checkpoint)

    with pytest.raises(ExportError, match=r"is damaged: .*bytes, its manifest says"):
        export.run(spec, silent())
    assert factory.store.find(spec.outputs["export"].ref) is None


def _add(
    factory: Factory,
    name: str,
    draft_size: int = DRAFT_SIZE,
    extra: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> ArtifactRef:
    mapping = identity_vocabulary(factory.target) if draft_size == 512 else _mapping(factory)
    config = draft_config(factory.target, draft_size, **options)
    weights = untrained_weights(config, factory.target, mapping["t2d"])
    if "hidden_size" in options:
        weights["lm_head.weight"] = weights["lm_head.weight"][:, : options["hidden_size"]].contiguous()
    return factory.add_checkpoint(config, weights | (extra or {}), mapping, name)


def _mapping(factory: Factory) -> dict[str, torch.Tensor]:
    return scattered_vocabulary(factory.target, DRAFT_SIZE)


def _folder(factory: Factory, spec: StepSpec) -> Path:
    return factory.store.folder(spec.outputs["export"].ref) / "vllm"


def _copy(folder: Path, destination: Path) -> Path:
    for path in folder.iterdir():
        (destination / path.name).write_bytes(path.read_bytes())
    return destination


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")
