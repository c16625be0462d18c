"""What is read from a target's folder: single file, index, tied, nested, unknown."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import TargetError
from eagle3_core.target.info import inspect_target

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
SHAPES = {
    "model.embed_tokens.weight": [16, 8],
    "model.layers.0.mlp.weight": [8, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [16, 8],
}


def write_safetensors(path: Path, shapes: dict[str, list[int]], fill: int = 0) -> None:
    header, start = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([fill]) * start)


def make_target(
    folder: Path, config: dict[str, Any] | None = None, shapes: Any = None, fill: int = 0
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    write_safetensors(folder / "model.safetensors", shapes or SHAPES, fill)
    return folder


def test_a_single_file_target_needs_no_index(tmp_path: Path) -> None:
    info = inspect_target(make_target(tmp_path))
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.tied_embeddings) == (4, 8, 16, False)
    assert info.lm_head.name == "lm_head.weight"
    assert info.norm.shape == (8,)


def test_the_head_of_a_tied_target_is_its_embedding(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    info = inspect_target(make_target(tmp_path, CONFIG | {"tie_word_embeddings": True}, shapes))
    assert info.tied_embeddings
    assert info.lm_head == info.embedding


def test_a_head_in_the_files_of_a_tied_target_is_not_the_one_that_engines_use(tmp_path: Path) -> None:
    info = inspect_target(make_target(tmp_path, CONFIG | {"tie_word_embeddings": True}))
    assert info.lm_head == info.embedding


def test_an_untied_target_without_a_head_is_refused_with_the_names_found(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    with pytest.raises(TargetError, match=r"no LM head.*found outside the layers: model.embed_tokens.weight"):
        inspect_target(make_target(tmp_path, CONFIG, shapes))


def test_a_language_model_inside_a_wrapper_is_found(tmp_path: Path) -> None:
    shapes = {f"model.language_model.{name.removeprefix('model.')}": shape for name, shape in SHAPES.items()}
    wrapper = {
        "architectures": ["WrapperForConditionalGeneration"],
        "text_config": CONFIG,
        "vision_config": {},
    }
    info = inspect_target(make_target(tmp_path, wrapper, shapes))
    assert (info.num_layers, info.model_type) == (4, "llama")
    assert info.norm.name == "model.language_model.norm.weight"


def test_tensors_are_found_through_an_index(tmp_path: Path) -> None:
    make_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(SHAPES)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        write_safetensors(tmp_path / file, {n: SHAPES[n] for n in names if files[n] == file})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert inspect_target(tmp_path).norm.file == "model-0.safetensors"
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(TargetError, match=r"model-1\.safetensors"):
        inspect_target(tmp_path)


def test_missing_or_damaged_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"cannot read .*config.json"):
        inspect_target(tmp_path / "nothing")
    folder = make_target(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TargetError, match="not a whole safetensors file"):
        inspect_target(folder)


def test_the_fingerprint_changes_with_weights_and_configuration(tmp_path: Path) -> None:
    first = inspect_target(make_target(tmp_path / "a")).fingerprint
    assert inspect_target(make_target(tmp_path / "b")).fingerprint == first
    assert inspect_target(make_target(tmp_path / "c", fill=1)).fingerprint != first
    assert inspect_target(make_target(tmp_path / "d", CONFIG | {"rope_theta": 1.0})).fingerprint != first


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json", "added_tokens.json"]
)
def test_what_decides_the_tokens_of_a_chat_is_in_the_tokenizers_fingerprint(
    tmp_path: Path, name: str
) -> None:
    folder = make_target(tmp_path)
    found = set()
    for content in (None, '{"eos_token_id": 2}', '{"eos_token_id": [2, 7]}'):
        if content:
            (folder / name).write_text(content)
        info = inspect_target(folder)
        found.add((info.tokenizer_fingerprint, info.fingerprint))
    assert len({tokenizer for tokenizer, _ in found}) == 3
    assert len({weights for _, weights in found}) == 1


def test_the_targets_own_code_is_in_its_fingerprint(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    before = inspect_target(folder).fingerprint
    (folder / "modeling_own.py").write_text("SCALE = 2")
    assert inspect_target(folder).fingerprint != before


def test_the_fingerprint_changes_with_one_small_tensor(tmp_path: Path) -> None:
    shapes = {"filler": [100_000, 8], **SHAPES, "more": [100_000, 8]}
    folder = make_target(tmp_path, shapes=shapes)
    first = inspect_target(folder).fingerprint
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    start, stop = json.loads(content[8 : 8 + length])["model.norm.weight"]["data_offsets"]
    content[8 + length + start : 8 + length + stop] = b"\x01" * (stop - start)
    file.write_bytes(content)
    assert inspect_target(folder).fingerprint != first
