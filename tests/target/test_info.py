"""What is read from a target's folder: single file, index, tied, nested, unknown."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import TargetError
from eagle3_core.target.files import FolderFiles
from eagle3_core.target.fingerprint import TOKENIZER_FILES, tokenizer_fingerprint
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


KIMI_TEXT: dict[str, Any] = CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
}
KIMI_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "kimi_k25_vision", "num_hidden_layers": 27, "hidden_size": 6},
    "text_config": KIMI_TEXT,
}
KIMI_SHAPES = {
    "language_model.model.embed_tokens.weight": [20, 8],
    "language_model.model.layers.1.self_attn.o_proj.weight": [8, 8],
    "language_model.model.norm.weight": [8],
    "language_model.lm_head.weight": [20, 8],
    "mm_projector.pre_norm.weight": [6],
    "vision_tower.encoder.blocks.0.norm0.weight": [6],
    "vision_tower.encoder.final_layernorm.weight": [6],
}


def test_the_multimodal_wrapper_of_kimi_k25_is_seen_through(tmp_path: Path) -> None:
    info = inspect_target(make_target(tmp_path, KIMI_CONFIG, KIMI_SHAPES))
    assert (info.architecture, info.model_type) == ("KimiK25ForConditionalGeneration", "kimi_k2")
    assert (info.nested_under, info.num_layers, info.hidden_size, info.vocab_size) == (
        "text_config",
        4,
        8,
        20,
    )
    assert info.embedding.name == "language_model.model.embed_tokens.weight"
    assert info.norm.name == "language_model.model.norm.weight"
    assert info.lm_head.name == "language_model.lm_head.weight"
    assert info.quantization == "compressed-tensors"
    assert info.quantization_facts is not None
    assert info.quantization_facts.left_out == ("lm_head", "re:.*self_attn.*")
    assert info.attention is not None
    assert (info.attention.kind, info.attention.latent_size) == ("mla", 40)
    assert info.experts is not None
    assert [rope.kind for rope in info.rope] == ["yarn"]


def test_its_weights_under_their_older_names_are_found_too(tmp_path: Path) -> None:
    shapes = {
        name.replace("language_model.model.", "language_model."): shape for name, shape in KIMI_SHAPES.items()
    }
    info = inspect_target(make_target(tmp_path, KIMI_CONFIG, shapes))
    assert info.norm.name == "language_model.norm.weight"
    assert info.embedding.name == "language_model.embed_tokens.weight"


@pytest.mark.parametrize("path", ["language_model", "language_config", "thinker_config.text_config"])
def test_a_configuration_nested_under_another_name_is_found(tmp_path: Path, path: str) -> None:
    config: dict[str, Any] = CONFIG
    for key in reversed(path.split(".")):
        config = {key: config}
    info = inspect_target(make_target(tmp_path, config))
    assert (info.nested_under, info.num_layers) == (path, 4)


@pytest.mark.parametrize("declared", [None, True, False])
def test_gemmas_embeddings_are_tied_unless_its_configuration_says_otherwise(
    tmp_path: Path, declared: bool | None
) -> None:
    config = CONFIG | {"model_type": "gemma3_text"}
    if declared is not None:
        config["tie_word_embeddings"] = declared
    assert inspect_target(make_target(tmp_path, config)).tied_embeddings is (declared is not False)


def test_an_unknown_layout_lists_what_was_found(tmp_path: Path) -> None:
    shapes = {
        "transformer.wte.weight": [16, 8],
        "transformer.h.0.attn.weight": [8, 8],
        "transformer.ln_f.weight": [8],
    }
    with pytest.raises(TargetError) as caught:
        inspect_target(make_target(tmp_path, shapes=shapes))
    for name in shapes:
        assert name in str(caught.value)
    assert "expected one of model.embed_tokens.weight, embed_tokens.weight" in str(caught.value)
    with pytest.raises(TargetError, match=r"has no num_hidden_layers; found keys architectures, n_layer"):
        inspect_target(make_target(tmp_path, {"architectures": ["GPT2LMHeadModel"], "n_layer": 4}))


def test_rows_of_the_embedding_that_no_token_has_are_counted(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    assert inspect_target(folder).padded_rows is None
    tokenizer = {"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 11}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    info = inspect_target(folder)
    assert (info.vocab_size, info.tokenizer_entries, info.padded_rows) == (16, 12, 4)


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


DECIDING_TOKENS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "tiktoken.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Spelt out again, so that a file that the fingerprint no longer reads is missed."""


@pytest.mark.parametrize("name", sorted({*DECIDING_TOKENS, *TOKENIZER_FILES}))
def test_each_file_of_a_tokenizer_is_in_its_fingerprint(tmp_path: Path, name: str) -> None:
    found = {tokenizer_fingerprint(FolderFiles(tmp_path))}
    for content in ("one", "two"):
        (tmp_path / name).write_text(content)
        found.add(tokenizer_fingerprint(FolderFiles(tmp_path)))
    assert len(found) == 3


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


@pytest.mark.parametrize(
    "values",
    [
        {"num_attention_heads": 4, "num_key_value_heads": [2, 2, 1, 1]},
        {"rope_scaling": "linear"},
        {"quantization_config": "fp8"},
        {"architectures": {"text": "LlamaForCausalLM"}},
        {"max_position_embeddings": "64k"},
    ],
)
def test_a_value_of_an_unknown_kind_is_refused_in_one_line(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match="holds a value of another kind") as caught:
        inspect_target(make_target(tmp_path, CONFIG | values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weight_map", [None, ["model.safetensors"], {"model.norm.weight": 3}])
def test_an_index_in_another_form_is_refused(tmp_path: Path, weight_map: Any) -> None:
    folder = make_target(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(TargetError, match="has no weight_map from tensors to files"):
        inspect_target(folder)
