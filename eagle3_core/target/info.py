"""What is known of a target from its folder, without loading weights and without torch."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import canonical_json
from eagle3_core.errors import TargetError

NESTED_CONFIGS = ("text_config", "language_config", "llm_config", "language_model")
EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight")
NORM_NAMES = ("model.norm.weight", "norm.weight")
HEAD_NAMES = ("lm_head.weight",)
WEIGHT_PREFIXES = ("", "language_model.", "model.language_model.", "model.")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "tiktoken.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""What decides the tokens of a chat: `generation_config.json` names the ids that end a turn."""
SAMPLED_TENSORS = 2048
SAMPLE_BYTES = 64
MAX_HEADER_BYTES = 100 << 20


class TensorPlace(BaseModel):
    """Where one tensor lies."""

    model_config = ConfigDict(frozen=True)
    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str


class TargetInfo(BaseModel):
    """Facts of a target.

    `vocab_size` counts the rows of the embedding, which may exceed the tokenizer's entries.
    """

    model_config = ConfigDict(frozen=True)
    path: str
    architecture: str
    model_type: str = Field(description="Of the language model, inside any wrapper.")
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    max_position_embeddings: int | None
    dtype: str | None
    quantization: str | None
    weights_bytes: int
    fingerprint: str = Field(
        description="Of the configuration, the target's code, and of weights: names, shapes, sizes, samples."
    )
    tokenizer_fingerprint: str = Field(description="Of tokenizer, chat template and end-of-turn ids.")
    embedding: TensorPlace
    norm: TensorPlace
    lm_head: TensorPlace = Field(
        description="The embedding where embeddings are tied, even if there is a head: vLLM ignores it."
    )
    text_config: dict[str, Any] = Field(description="Configuration of the language model.")


def inspect_target(path: Path) -> TargetInfo:
    """Read a target's configuration and weight headers.

    Raises:
        TargetError: missing folder or files, unreadable JSON or headers, or an unknown layout, in which case
            the tensor names found are listed.
    """
    config = _read_json(path / "config.json")
    text = text_config(config)
    headers = read_headers(path)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    embedding = _find(headers, EMBEDDING_NAMES, "embedding", path)
    norm = _find(headers, NORM_NAMES, "final norm", path)
    lm_head = embedding if tied else _find(headers, HEAD_NAMES, "LM head", path)
    return TargetInfo(
        path=str(path),
        architecture=(config.get("architectures") or ["unknown"])[0],
        model_type=str(text.get("model_type", "unknown")),
        num_layers=_integer(text, "num_hidden_layers", path),
        hidden_size=_integer(text, "hidden_size", path),
        vocab_size=embedding.shape[0],
        tied_embeddings=tied,
        max_position_embeddings=text.get("max_position_embeddings"),
        dtype=text.get("dtype") or text.get("torch_dtype") or config.get("dtype"),
        quantization=(config.get("quantization_config") or text.get("quantization_config") or {}).get(
            "quant_method"
        ),
        weights_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        fingerprint=_fingerprint(config, headers, path),
        tokenizer_fingerprint=_hash_files(path, TOKENIZER_FILES),
        embedding=embedding,
        norm=norm,
        lm_head=lm_head,
        text_config=text,
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration inside a (multimodal) wrapper's, or the configuration itself."""
    for key in NESTED_CONFIGS:
        if isinstance(config.get(key), dict) and "num_hidden_layers" in config[key]:
            return config[key]
    return config


def read_headers(path: Path) -> dict[str, TensorPlace]:
    """Name, file, shape and dtype of every tensor in a folder's safetensors files.

    Raises:
        TargetError: no safetensors files, a missing shard of the index, or a damaged header.
    """
    index = path / "model.safetensors.index.json"
    names = (
        sorted(set(_read_json(index).get("weight_map", {}).values()))
        if index.is_file()
        else sorted(file.name for file in path.glob("*.safetensors"))
    )
    if not names:
        raise TargetError(f"{path} has no safetensors weights", remedy="point target.model to a full model")
    places: dict[str, TensorPlace] = {}
    for name in names:
        for tensor, entry in read_header(path / name).items():
            places[tensor] = TensorPlace(
                name=tensor, file=name, shape=tuple(entry["shape"]), dtype=entry["dtype"]
            )
    return places


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors that a safetensors file declares: name to shape, dtype and data offsets.

    Raises:
        TargetError: missing, or not a whole safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes instead of {8 + length + end}")
        return header
    except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
        raise TargetError(f"{file} is not a whole safetensors file ({error})") from error


def _find(headers: dict[str, TensorPlace], names: tuple[str, ...], what: str, path: Path) -> TensorPlace:
    for prefix in WEIGHT_PREFIXES:
        for name in names:
            if prefix + name in headers:
                return headers[prefix + name]
    outside_layers = sorted(name for name in headers if ".layers." not in name)[:12]
    raise TargetError(
        f"{path} has no {what} under a known name",
        expected=f"one of {', '.join(names)}, with or without a language-model prefix",
        remedy=f"found outside the layers: {', '.join(outside_layers) or 'nothing'}",
    )


def _integer(config: dict[str, Any], key: str, path: Path) -> int:
    if not isinstance(config.get(key), int):
        raise TargetError(f"{path}/config.json has no {key}; found keys {', '.join(sorted(config)[:20])}")
    return config[key]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TargetError(
            f"cannot read {path} ({error})", remedy="set target.model to a Hugging Face model folder"
        ) from error
    if not isinstance(document, dict):
        raise TargetError(f"{path} is not a JSON object")
    return document


def _fingerprint(config: dict[str, Any], headers: dict[str, TensorPlace], path: Path) -> str:
    ignored = {"_name_or_path", "transformers_version"}
    document = {
        "config": {key: value for key, value in config.items() if key not in ignored},
        "tensors": {name: [place.file, place.dtype, *place.shape] for name, place in headers.items()},
        "sizes": {name: (path / name).stat().st_size for name in sorted({p.file for p in headers.values()})},
        "code": _hash_files(path, tuple(sorted(file.name for file in path.glob("*.py")))),
        "sample": {name: _sample_hash(path / name) for name in sorted({p.file for p in headers.values()})},
    }
    return hashlib.sha256(canonical_json(document)).hexdigest()[:32]


def _sample_hash(file: Path, num_blocks: int = 16, block_bytes: int = 4096) -> str:
    """Hash of a few evenly spaced blocks and of the middle of every tensor (of `SAMPLED_TENSORS` at most).

    Tells retrained weights of equal shape apart at no cost, also where only one tensor was trained.
    """
    size = file.stat().st_size
    places = [
        (max(0, (size - block_bytes) * index // max(1, num_blocks - 1)), block_bytes)
        for index in range(num_blocks)
    ]
    spans = sorted(tuple(entry["data_offsets"]) for entry in read_header(file).values())
    data = size - max((stop for _, stop in spans), default=0)
    stride = -(-len(spans) // SAMPLED_TENSORS) or 1
    for start, stop in spans[::stride]:
        length = min(SAMPLE_BYTES, stop - start)
        places.append((data + (start + stop - length) // 2, length))
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        for place, length in places:
            handle.seek(place)
            digest.update(handle.read(length))
    return digest.hexdigest()[:16]


def _hash_files(path: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        if (path / name).is_file():
            digest.update(name.encode() + b"\0" + (path / name).read_bytes())
    return digest.hexdigest()[:32]
