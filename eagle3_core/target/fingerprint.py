"""What makes two targets the same: hashes that enter the ids of artifacts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import canonical_json
from eagle3_core.target.files import FolderFiles, TargetFiles, TensorPlace, read_header

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "tiktoken.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""What decides the tokens of a chat: `generation_config.json` names the ids that end a turn."""
TOKENIZER_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "sentencepiece.bpe.model", "spiece.model",
    "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files of which one must be there: each holds a tokenizer's vocabulary."""
IGNORED_KEYS = {"_name_or_path", "transformers_version"}
SAMPLED_TENSORS = 2048
SAMPLE_BYTES = 64
HEADERS_ONLY = "headers:"
"""Starts the fingerprint of a target whose weights are not on this machine; no artifact is made of it."""


def tokenizer_fingerprint(files: TargetFiles) -> str:
    """Hash of tokenizer, chat template and end-of-turn ids."""
    return _hash_files(files, TOKENIZER_FILES)


def target_fingerprint(config: Mapping[str, Any], tensors: Mapping[str, TensorPlace], folder: Path) -> str:
    """Hash of configuration, the target's code, and of weights: names, shapes, sizes, samples of bytes."""
    files = FolderFiles(folder)
    weights = sorted({place.file for place in tensors.values()})
    document = {
        **_declared(config, tensors),
        "sizes": {name: (folder / name).stat().st_size for name in weights},
        "code": _hash_files(files, tuple(sorted(file.name for file in folder.glob("*.py")))),
        "sample": {name: _sample_hash(folder / name) for name in weights},
    }
    return hashlib.sha256(canonical_json(document)).hexdigest()[:32]


def headers_fingerprint(config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]) -> str:
    """Hash of what is known without the weights themselves, marked so."""
    digest = hashlib.sha256(canonical_json(_declared(config, tensors))).hexdigest()
    return HEADERS_ONLY + digest[:32]


def _declared(config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]) -> dict[str, Any]:
    return {
        "config": {key: value for key, value in config.items() if key not in IGNORED_KEYS},
        "tensors": {name: [place.file, place.dtype, *place.shape] for name, place in tensors.items()},
    }


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


def _hash_files(files: TargetFiles, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        content = files.read(name)
        if content is not None:
            digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:32]
