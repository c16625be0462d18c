"""Every draft option goes from the profile through training into the folder that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_core.serving.draft import read_draft
from eagle3_core.serving.vllm_format import check_vllm, write_vllm
from eagle3_core.store.local import LocalStore
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import train
from tests.training.examples import AUX_IDS, make_config, make_samples, write_inputs

pytestmark = pytest.mark.engine
CASES: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    (
        {"block": "qwen3", "sliding_window": 16, "num_layers": 2},
        {"optimizer": "muon", "state_noise": "uniform"},
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
    ),
    (
        {"sliding_window": 16, "train_lm_head": True},
        {"loss": {"kind": "acceptance"}},
        {"model_type": "llama", "layer_types": ["sliding_attention"], "sliding_window": 16},
    ),
)


@pytest.mark.parametrize(("draft", "settings", "written"), CASES, ids=("qwen3", "llama"))
def test_options_are_trained_and_exported_explicitly(
    draft: dict[str, Any],
    settings: dict[str, Any],
    written: dict[str, Any],
    tmp_path: Path,
    tiny_target: TargetInfo,
) -> None:
    config = make_config(tiny_target.path, draft=draft, train={"num_epochs": 1, **settings})
    spec = write_inputs(tmp_path / "store", config, tiny_target, make_samples(tiny_target))
    result = train.run(spec, lambda *_, **__: None)  # type: ignore[arg-type]
    assert all(np.isfinite(epoch.train_loss) for epoch in result.epochs)
    store = LocalStore(tmp_path / "store")
    checkpoint, vocabulary = spec.outputs["checkpoint"].ref, spec.inputs["vocabulary"]
    trained = read_draft(store.folder(checkpoint), store.folder(vocabulary))
    folder = tmp_path / "vllm"
    folder.mkdir()
    options = {"include_embedding": False}
    write_vllm(folder, trained, tiny_target, verifier=tiny_target.path, num_speculative_tokens=3, **options)
    check_vllm(folder, trained, tiny_target, aux_layer_ids=AUX_IDS, **options)
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert {name: layer[name] for name in written} == written
