"""What determines each artifact: pure functions from configuration and parents to an `ArtifactPlan`.

They import no torch, so the orchestrator knows every id before it starts an engine. `STEP_VERSION` of a kind
is raised by hand when the step's output changes for equal inputs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef, Manifest
from eagle3_core.config import RunConfig, resolve_path
from eagle3_core.errors import DataError
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id, resolve_aux_layer_ids
from eagle3_core.target.locate import verifier_name

STEP_VERSION: dict[ArtifactKind, int] = {
    "conversations": 2,
    "dataset": 2,
    "vocabulary": 1,
    "capture": 2,
    "verification": 3,
    "labels": 1,
    "checkpoint": 3,
    "export": 1,
    "benchmark": 2,
}
IMPORTED = "imported "
"""Begins the name of the engine of what another project has made."""
WITHOUT_EFFECT = {
    "checkpoint_every_seconds",
    "keep_last",
    "num_ranks",
    "parallel",
    "stall_timeout_minutes",
    "tensorboard",
}
"""Settings of training that change nothing in a finished checkpoint, or no more than its rounding."""
BUILTIN_PROMPTS = Path(__file__).parent / "data" / "builtin" / "prompts.jsonl"


def prompt_files(config: RunConfig) -> list[Path]:
    """The JSONL files that `data.prompts` names.

    Raises:
        DataError: one does not exist.
    """
    names = config.data.prompts
    files = [BUILTIN_PROMPTS if name == "builtin" else resolve_path(name) for name in names]
    for name, file in zip(names, files, strict=True):
        if not file.is_file():
            listed = f"write several files as a list: data.prompts=[{name}]" if "," in name else None
            raise DataError(f"data.prompts names {file}, which is not a file", remedy=listed)
    return files


def prompt_hashes(config: RunConfig) -> list[str]:
    """The hash of each prompt file's content, in order.

    Raises:
        DataError: one does not exist or cannot be read.
    """
    try:
        return [hashlib.sha256(file.read_bytes()).hexdigest()[:32] for file in prompt_files(config)]
    except OSError as error:
        raise DataError(f"cannot read the prompts ({error})", remedy="check data.prompts") from error


def prompt_facts(config: RunConfig) -> list[dict[str, str]]:
    """Name and hash of each prompt file, for the manifest: names say what was meant and determine nothing.

    Raises:
        DataError: one does not exist or cannot be read.
    """
    pairs = zip(config.data.prompts, prompt_hashes(config), strict=True)
    return [{"name": name, "sha256": digest} for name, digest in pairs]


def plan_conversations(config: RunConfig, target: TargetInfo, engine_version: str) -> ArtifactPlan:
    """The target's own answers to the prompts."""
    generation = config.data.generation
    sampling = {"top_p": generation.top_p, "seed": generation.seed} if generation.temperature else {}
    identity = {
        "prompts": prompt_hashes(config),
        "heldout_fraction": config.data.heldout_fraction,
        "limit": config.limit,
        "max_tokens": generation.max_tokens,
        "temperature": generation.temperature,
        "max_model_len": config.engine.max_model_len,
        "engine": engine_version,
    }
    return _plan("conversations", identity | sampling | _target_identity(config, target))


def plan_dataset(config: RunConfig, target: TargetInfo, conversations: ArtifactRef) -> ArtifactPlan:
    """Token ids and loss masks."""
    identity = {
        "tokenizer": target.tokenizer_fingerprint,
        "max_length": config.data.max_length,
        "min_trainable_tokens": config.data.min_trainable_tokens,
    }
    return _plan("dataset", identity, parents={"conversations": conversations})


def plan_imported_dataset(target: TargetInfo, engine: str, content_hash: str) -> ArtifactPlan:
    """Token ids and loss masks that somebody else has made; determined by themselves."""
    return _plan(
        "dataset", {"content": content_hash, "engine": engine, "tokenizer": target.tokenizer_fingerprint}
    )


def plan_of_imported_capture(config: RunConfig, target: TargetInfo, found: Manifest) -> ArtifactPlan | None:
    """The plan by which `config` would import a capture that is in the store; None of one that a run made."""
    engine, content = str(found.identity.get("engine", "")), str(found.identity.get("content"))
    if not engine.startswith(IMPORTED) or "dataset" not in found.parents:
        return None
    return plan_capture(config, target, found.parents["dataset"], content, engine)


def plan_vocabulary(config: RunConfig, target: TargetInfo, dataset: ArtifactRef) -> ArtifactPlan:
    """The draft vocabulary mapping."""
    identity = {
        "draft_vocab_size": draft_vocab_size(config, target),
        "target_vocab_size": target.vocab_size,
    }
    return _plan("vocabulary", identity, parents={"dataset": dataset})


def plan_capture(
    config: RunConfig, target: TargetInfo, dataset: ArtifactRef, content_hash: str, engine_version: str
) -> ArtifactPlan:
    """Hidden states; determined by the dataset's ids and masks (`content_hash`), whatever made them."""
    identity = {
        "content": content_hash,
        "aux_layer_ids": list(resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)),
        "final_layer_id": final_layer_id(target.num_layers),
        "final_state": config.capture.final_state,
        "shard_bytes": int(config.capture.shard_bytes),
        "engine": engine_version,
    }
    plan = _plan("capture", identity | _target_identity(config, target))
    return plan.model_copy(update={"parents": {"dataset": dataset}})


def plan_verification(config: RunConfig, capture: ArtifactRef) -> ArtifactPlan:
    """The result of checking a capture."""
    return _plan("verification", config.verify.model_dump(mode="json"), parents={"capture": capture})


def plan_labels(capture: ArtifactRef, vocabulary: ArtifactRef) -> ArtifactPlan:
    """What the target itself says at the rows that a loss reads."""
    return _plan("labels", {}, parents={"capture": capture, "vocabulary": vocabulary})


def plan_checkpoint(
    config: RunConfig, target: TargetInfo, capture: ArtifactRef, vocabulary: ArtifactRef
) -> ArtifactPlan:
    """The trained draft; how often it is saved and what is shown meanwhile does not matter."""
    benchmark = config.benchmark
    identity = {
        "train": config.train.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        "draft": config.draft.model_dump(mode="json") | {"vocab_size": draft_vocab_size(config, target)},
        "replay": {
            "max_tokens": benchmark.max_tokens,
            "num_prompts": benchmark.num_prompts,
            "num_speculative_tokens": benchmark.num_speculative_tokens,
        },
    }
    labels = plan_labels(capture, vocabulary).ref
    parents = {"capture": capture, "vocabulary": vocabulary, "labels": labels}
    return _plan("checkpoint", identity, parents=parents)


def plan_export(config: RunConfig, target: TargetInfo, checkpoint: ArtifactRef) -> ArtifactPlan:
    """The folder that engines load; it names the target, so a target that was moved gives another one."""
    identity = config.export.model_dump(mode="json", exclude={"serving"})
    identity["verifier"] = verifier_name(config, target.path)
    return _plan("export", identity, parents={"checkpoint": checkpoint})


def plan_benchmark(
    config: RunConfig, export: ArtifactRef, dataset: ArtifactRef, engine_version: str
) -> ArtifactPlan:
    """Measured acceptance; the pass limit is applied to the result and is not part of it."""
    identity = config.benchmark.model_dump(mode="json", exclude={"min_acceptance_length"})
    identity["engine"] = engine_version
    return _plan("benchmark", identity, parents={"export": export, "dataset": dataset})


def draft_vocab_size(config: RunConfig, target: TargetInfo) -> int:
    """Draft vocabulary entries; the target's when the profile names none.

    Raises:
        DataError: larger than the target's.
    """
    size = config.draft.vocab_size or target.vocab_size
    if size > target.vocab_size:
        raise DataError(
            f"draft.vocab_size is {size:,}", expected=f"at most the target's {target.vocab_size:,}"
        )
    return size


def _target_identity(config: RunConfig, target: TargetInfo) -> dict[str, Any]:
    return {
        "target": target.fingerprint,
        "tokenizer": target.tokenizer_fingerprint,
        "revision": config.target.revision,
        "dtype": config.target.dtype,
        "quantization": target.quantization,
    }


def _plan(
    kind: ArtifactKind, identity: dict[str, Any], parents: dict[str, ArtifactRef] | None = None
) -> ArtifactPlan:
    """A plan whose id depends on the step version, `identity` and the parents' ids."""
    made_from = {role: str(ref) for role, ref in (parents or {}).items()}
    document = {"step_version": STEP_VERSION[kind], "made_from": made_from, **identity}
    return ArtifactPlan(kind=kind, identity=document, parents=parents or {})
