"""Single tensors of a target, and the final norm and LM head against the target's own logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.errors import TargetError
from eagle3_core.target.files import FolderFiles
from eagle3_core.target.info import describe_target, inspect_target
from eagle3_core.target.weights import FinalHead, read_embedding, read_lm_head
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("tied", [False, True])
def test_norm_and_head_on_the_final_state_give_the_targets_logits(tmp_path: Path, tied: bool) -> None:
    info = inspect_target(make_tiny_target(tmp_path, tied=tied, num_layers=3))
    states, logits = ReferenceModel(info, "float32").forward(torch.arange(3, 60), (3,))
    rebuilt = FinalHead(info).final_logits(states[:, 0])
    assert torch.equal(rebuilt.argmax(-1), logits.argmax(-1))
    assert (rebuilt - logits).abs().max() < 1e-4
    assert torch.equal(read_lm_head(info), read_embedding(info)) == tied


def test_chunks_cover_all_rows_in_order(tmp_path: Path) -> None:
    head = FinalHead(inspect_target(make_tiny_target(tmp_path, num_layers=1)))
    states = torch.randn(10, 128)
    parts = list(head.chunks(states, rows=4))
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 4), (4, 8), (8, 10)]
    torch.testing.assert_close(torch.cat([logits for _, logits in parts]), head.final_logits(states))


def test_a_norm_that_is_not_known_is_refused_instead_of_computed_wrongly(tmp_path: Path) -> None:
    info = inspect_target(make_tiny_target(tmp_path, num_layers=1))
    for model_type in ("gemma3_text", "cohere2", "granite", "qwen3_next"):
        with pytest.raises(TargetError, match=f"{model_type}.*not known"):
            FinalHead(info.model_copy(update={"model_type": model_type}))


def test_norm_and_head_are_read_without_the_other_files(tmp_path: Path) -> None:
    path = make_tiny_target(tmp_path, num_layers=3)
    expected = FinalHead(inspect_target(path)).final_logits(torch.ones(2, 128))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    file_of = {
        name: "layers.safetensors" if ".layers." in name else f"{name}.safetensors" for name in tensors
    }
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    (path / "layers.safetensors").unlink()
    (path / "model.embed_tokens.weight.safetensors").unlink()
    info = describe_target(FolderFiles(path))
    assert info.missing_files == ("layers.safetensors", "model.embed_tokens.weight.safetensors")
    assert torch.equal(FinalHead(info).final_logits(torch.ones(2, 128)), expected)
    with pytest.raises(TargetError, match=r"model\.embed_tokens\.weight .*its file is not here"):
        read_embedding(info)


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    path = make_tiny_target(tmp_path, num_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(TargetError, match=r"lm_head\.weight.*stored as I8"):
        FinalHead(inspect_target(path))
