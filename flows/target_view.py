"""What `eagle3 target inspect` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3_core.config import RunConfig
from eagle3_core.errors import TargetError
from eagle3_core.host.inspect import GIB
from eagle3_core.target.architecture import AttentionFacts, ExpertFacts, RopeFacts
from eagle3_core.target.files import NOT_HERE, TensorPlace
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id, resolve_aux_layer_ids
from eagle3_core.target.lookup import look_up_target
from eagle3_core.target.quantization import QuantizationFacts

MAX_LISTED = 8
NOT_DECLARED = "not declared"


def show_target(config: RunConfig, as_json: bool) -> None:
    """Print what is known of a target without loading it."""
    info, note = look_up_target(config)
    if as_json:
        print(
            json.dumps(
                info.model_dump(mode="json") | {"padded_rows": info.padded_rows, "note": note}, indent=1
            )
        )
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in rows(info):
        table.add_row(key, escape(value))
    console = Console(highlight=False)
    console.print(table)
    if note:
        console.print(escape(note))


def rows(info: TargetInfo) -> Iterator[tuple[str, str]]:
    """Each fact with its value in words."""
    yield "target", info.path
    nested = f" (language model under {info.nested_under})" if info.nested_under else ""
    yield "architecture", f"{info.architecture}, {info.model_type}{nested}"
    yield "layers", f"{info.num_layers}"
    yield "hidden size", f"{info.hidden_size:,}"
    yield "vocabulary", _vocabulary(info)
    yield "embeddings", "tied" if info.tied_embeddings else "not tied"
    yield (
        "positions",
        "not declared" if info.max_position_embeddings is None else f"{info.max_position_embeddings:,}",
    )
    for rope in info.rope:
        yield "RoPE", _rope(rope)
    if info.attention:
        yield "attention", _attention(info.attention)
    if info.experts:
        yield "experts", _experts(info.experts)
    yield "dtype", info.dtype or NOT_DECLARED
    yield "quantisation", _quantization(info.quantization_facts)
    yield "parameters", _number(info.num_parameters, "not known while files are missing")
    yield "weights", f"{info.weights_bytes:,} bytes ({info.weights_bytes / GIB:.1f} GiB)"
    for role, place in (("embedding", info.embedding), ("final norm", info.norm), ("LM head", info.lm_head)):
        yield role, _place(place)
    yield "auxiliary capture ids", _default_ids(info.num_layers)
    yield "final capture id", f"{final_layer_id(info.num_layers)}"
    yield "fingerprint", info.fingerprint
    yield "tokenizer fingerprint", info.tokenizer_fingerprint
    if info.missing_files:
        listed = ", ".join(info.missing_files[:MAX_LISTED])
        more = len(info.missing_files) - MAX_LISTED
        yield "missing files", listed + (f" and {more} more" if more > 0 else "")


def _number(value: int | None, otherwise: str = NOT_DECLARED) -> str:
    return otherwise if value is None else f"{value:,}"


def _experts(experts: ExpertFacts) -> str:
    per_token = _number(experts.num_per_token, "an undeclared number")
    parts = [f"{experts.num_experts}, {per_token} for each token, {experts.num_shared} shared"]
    if experts.num_dense_layers:
        parts.append(f"none in the first {experts.num_dense_layers} layers")
    return ", ".join(parts)


def _vocabulary(info: TargetInfo) -> str:
    if info.tokenizer_entries is None:
        return f"{info.vocab_size:,} rows; no tokenizer found"
    return f"{info.tokenizer_entries:,} token ids, {info.padded_rows:,} padded rows, {info.vocab_size:,} rows"


def _rope(rope: RopeFacts) -> str:
    parts = [rope.kind, f"theta {rope.theta:g}" if rope.theta is not None else f"theta {NOT_DECLARED}"]
    if rope.factor is not None:
        parts.append(f"factor {rope.factor:g}")
    if rope.original_positions is not None:
        parts.append(f"{rope.original_positions:,} original positions")
    if rope.layers != "all":
        parts.append(f"in layers of {rope.layers}")
    return ", ".join(parts)


def _attention(attention: AttentionFacts) -> str:
    parts = [attention.kind, f"{attention.num_heads} heads"]
    if attention.latent_size is None:
        parts += [f"{attention.num_kv_heads} of keys and values", f"head size {attention.head_size}"]
    else:
        parts.append(f"latent size {attention.latent_size}")
    if attention.sliding_window is not None:
        parts.append(f"window {attention.sliding_window:,}")
    if len(attention.layer_kinds) > 1 or attention.sliding_window is not None:
        parts.append(" + ".join(f"{count} {kind}" for kind, count in attention.layer_kinds.items()))
    return ", ".join(parts)


def _quantization(facts: QuantizationFacts | None) -> str:
    if facts is None:
        return "none"
    parts = [facts.method + (f" ({facts.format})" if facts.format else "")]
    if facts.bits is not None:
        parts.append(f"{facts.bits} bits")
    if facts.group_size is not None:
        parts.append(f"groups of {facts.group_size}")
    if facts.block:
        parts.append(f"blocks of {' x '.join(map(str, facts.block))}")
    if facts.left_out:
        more = len(facts.left_out) - MAX_LISTED
        parts.append(
            f"left out: {', '.join(facts.left_out[:MAX_LISTED])}" + (f" and {more} more" if more > 0 else "")
        )
    return ", ".join(parts)


def _place(place: TensorPlace) -> str:
    what = NOT_HERE if place.dtype == NOT_HERE else f"{place.dtype} {list(place.shape)}"
    return f"{place.name}, {what}, in {place.file}"


def _default_ids(num_layers: int) -> str:
    try:
        return ", ".join(map(str, resolve_aux_layer_ids(None, num_layers)))
    except TargetError as error:
        return str(error)
