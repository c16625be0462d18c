"""What is known of a target from its files, without loading weights and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.errors import TargetError
from eagle3_core.target.architecture import (
    AttentionFacts,
    ExpertFacts,
    RopeFacts,
    attention_facts,
    expert_facts,
    rope_facts,
)
from eagle3_core.target.files import (
    WEIGHTS_SUFFIX,
    FolderFiles,
    TargetFiles,
    TensorPlace,
    find_tensors,
    read_json,
)
from eagle3_core.target.fingerprint import headers_fingerprint, target_fingerprint, tokenizer_fingerprint
from eagle3_core.target.quantization import QuantizationFacts, count_parameters, quantization_facts
from eagle3_core.target.tokenizer import tokenizer_entries

NESTED_CONFIGS = ("text_config", "language_config", "llm_config", "language_model", "thinker_config")
EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight")
NORM_NAMES = ("model.norm.weight", "norm.weight")
HEAD_NAMES = ("lm_head.weight",)
WEIGHT_PREFIXES = (
    "", "language_model.", "model.language_model.", "model.", "text_model.", "model.text_model.", "llm.",
    "thinker.",
)  # fmt: skip
"""What a wrapper puts before the names of its language model: `language_model.` in Kimi-K2.5."""
TIED_BY_DEFAULT = ("gemma", "cohere", "ernie4_5", "lfm2", "smollm3", "starcoder2", "minicpm3")
"""Starts of model types whose embeddings are tied unless the configuration says otherwise."""
SHOWN_NAMES = 12


class TargetInfo(BaseModel):
    """Facts of a target.

    `vocab_size` counts the rows of the embedding, which may exceed the tokenizer's entries.
    """

    model_config = ConfigDict(frozen=True)
    path: str = Field(description="Folder, or hub id where the weights are not here.")
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
        description="Of the configuration, the target's code, and of weights: names, shapes, sizes, samples. "
        "Starts with `headers:` where the weights are not here."
    )
    tokenizer_fingerprint: str = Field(description="Of tokenizer, chat template and end-of-turn ids.")
    embedding: TensorPlace
    norm: TensorPlace
    lm_head: TensorPlace = Field(
        description="The embedding where embeddings are tied, even if there is a head: vLLM ignores it."
    )
    text_config: dict[str, Any] = Field(description="Configuration of the language model.")
    nested_under: str | None = Field(
        default=None, description="Key of a wrapper's configuration that holds the language model's."
    )
    tokenizer_entries: int | None = Field(default=None, description="Token ids that the tokenizer has.")
    num_parameters: int | None = Field(
        default=None, description="Of all weights, wrapper included; None while files are missing."
    )
    quantization_facts: QuantizationFacts | None = None
    rope: tuple[RopeFacts, ...] = ()
    attention: AttentionFacts | None = None
    experts: ExpertFacts | None = None
    missing_files: tuple[str, ...] = Field(
        default=(), description="Weight files that the index names but that are not there."
    )

    @property
    def padded_rows(self) -> int | None:
        """Rows of the embedding that no token has."""
        return None if self.tokenizer_entries is None else self.vocab_size - self.tokenizer_entries


def inspect_target(path: Path) -> TargetInfo:
    """Read the configuration and weight headers of a target that can be loaded.

    Raises:
        TargetError: missing folder or files, unreadable JSON or headers, or an unknown layout, in which case
            the tensor names found are listed.
    """
    files = FolderFiles(path)
    config = _config(files)
    tensors, missing = find_tensors(files)
    if missing:
        raise TargetError(
            f"{path} lacks {len(missing)} of the weight files that its index names: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}",
            remedy="fetch the target whole; `eagle3 target inspect` shows what is known without them",
        )
    return _read_facts(files, config, tensors, missing, target_fingerprint(config, tensors, path))


def describe_target(files: TargetFiles) -> TargetInfo:
    """The same of a target whose weights need not be here: on the hub, or half fetched.

    Raises:
        TargetError: no configuration, unreadable JSON or headers, or an unknown layout.
    """
    config = _config(files)
    tensors, missing = find_tensors(files)
    return _read_facts(files, config, tensors, missing, headers_fingerprint(config, tensors))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration inside a (multimodal) wrapper's, or the configuration itself."""
    return _find_text_config(config)[1]


def _find_text_config(config: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The dotted key of the language model's configuration, and that configuration."""
    for key in NESTED_CONFIGS:
        inner = config.get(key)
        if not isinstance(inner, dict):
            continue
        if "num_hidden_layers" in inner:
            return key, inner
        deeper, found = _find_text_config(inner)
        if deeper:
            return f"{key}.{deeper}", found
    return None, config


def _read_facts(
    files: TargetFiles,
    config: dict[str, Any],
    tensors: Mapping[str, TensorPlace],
    missing: tuple[str, ...],
    fingerprint: str,
) -> TargetInfo:
    """`_describe`, where a value of a kind that no known configuration has is the target's fault."""
    try:
        return _describe(files, config, tensors, missing, fingerprint)
    except (ValidationError, TypeError, AttributeError, KeyError) as error:
        raise TargetError(
            f"{files.name}/config.json holds a value of another kind than is known "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            remedy="correct it; a layout of this kind is not supported",
        ) from error


def _describe(
    files: TargetFiles,
    config: dict[str, Any],
    tensors: Mapping[str, TensorPlace],
    missing: tuple[str, ...],
    fingerprint: str,
) -> TargetInfo:
    nested_under, text = _find_text_config(config)
    num_layers, hidden_size = (_integer(text, key, files) for key in ("num_hidden_layers", "hidden_size"))
    tied = _is_tied(config, text)
    embedding = _find(tensors, EMBEDDING_NAMES, "embedding", files)
    norm = _find(tensors, NORM_NAMES, "final norm", files)
    lm_head = embedding if tied else _find(tensors, HEAD_NAMES, "LM head", files)
    quantization = quantization_facts(config, text, read_json(files, "hf_quant_config.json"))
    return TargetInfo(
        path=files.name,
        architecture=(config.get("architectures") or ["unknown"])[0],
        model_type=str(text.get("model_type", "unknown")),
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=embedding.shape[0] if embedding.shape else _integer(text, "vocab_size", files),
        tied_embeddings=tied,
        max_position_embeddings=text.get("max_position_embeddings"),
        dtype=text.get("dtype") or text.get("torch_dtype") or config.get("dtype"),
        quantization=(config.get("quantization_config") or text.get("quantization_config") or {}).get(
            "quant_method"
        ),
        weights_bytes=sum(size for name, size in files.sizes().items() if name.endswith(WEIGHTS_SUFFIX)),
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(files),
        embedding=embedding,
        norm=norm,
        lm_head=lm_head,
        text_config=text,
        nested_under=nested_under,
        tokenizer_entries=tokenizer_entries(files),
        num_parameters=None if missing else count_parameters(tensors.values(), quantization),
        quantization_facts=quantization,
        rope=rope_facts(text),
        attention=attention_facts(text),
        experts=expert_facts(text),
        missing_files=missing,
    )


def _config(files: TargetFiles) -> dict[str, Any]:
    if files.read("config.json") is None:
        raise TargetError(
            f"cannot read {files.name}/config.json: there is none",
            remedy="set target.model to a Hugging Face model folder",
        )
    return read_json(files, "config.json")


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    for part in (text, config):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return str(text.get("model_type", "")).startswith(TIED_BY_DEFAULT)


def _find(
    tensors: Mapping[str, TensorPlace], names: tuple[str, ...], what: str, files: TargetFiles
) -> TensorPlace:
    for prefix in WEIGHT_PREFIXES:
        for name in names:
            if prefix + name in tensors:
                return tensors[prefix + name]
    outside_layers = sorted(name for name in tensors if ".layers." not in name and ".blocks." not in name)
    found = ", ".join((outside_layers or sorted(tensors))[:SHOWN_NAMES]) or "nothing"
    raise TargetError(
        f"{files.name} has no {what} under a known name",
        expected=f"one of {', '.join(names)}, with or without a language-model prefix",
        remedy=f"found {'outside the layers' if outside_layers else 'instead'}: {found}",
    )


def _integer(config: Mapping[str, Any], key: str, files: TargetFiles) -> int:
    if not isinstance(config.get(key), int):
        raise TargetError(
            f"{files.name}/config.json has no {key}", remedy=f"found keys {', '.join(sorted(config)[:20])}"
        )
    return config[key]
