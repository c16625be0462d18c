"""Drafts, targets and artifacts for the tests of export and benchmark.

Legend: H hidden size, V target vocabulary.

The *cycle target* has no context: its layers add nothing, and its LM head maps each token to one successor,
so that every continuation is known by hand. The *cycle draft* reads only the embedding of the newest token
and knows the same successors, so that the target always agrees, as far as the draft vocabulary reaches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from eagle3_core.artifacts import ArtifactPlan, ArtifactRef
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.contracts import StepSpec
from eagle3_core.identity import plan_benchmark, plan_export
from eagle3_core.step import Progress
from eagle3_core.store.dataset import DATASET_FILE, Sample, write_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.weights import read_lm_head
from tests.tiny import make_tiny_target

AUX_IDS = (1, 2, 3)
NUM_TOKENS = 500
"""Ids with a token in the tiny tokenizer; further rows of the embedding have none."""
END_TOKEN = 2
STRANGERS = ("embed_tokens", "verifier", "t2d", "d2t", "rotary")
ATTENTION_SHARPNESS = 8.0


def make_cycle_target(folder: Path) -> Path:
    """A four-layer target whose greedy next token is `successors()[token]`."""
    make_tiny_target(folder, num_layers=4, end_scale=1.0, dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = torch.randn(weights["model.embed_tokens.weight"].shape, generator=_generator(1))
    embedding = torch.nn.functional.normalize(embedding, dim=1)
    weights["model.embed_tokens.weight"] = embedding
    head = torch.zeros_like(embedding)
    head[successors()] = embedding[:NUM_TOKENS]
    weights["lm_head.weight"] = head
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def successors() -> torch.Tensor:
    """[V] the token after each token: one cycle through all of them."""
    order = torch.randperm(NUM_TOKENS, generator=_generator(2))
    following = torch.empty(NUM_TOKENS, dtype=torch.long)
    following[order] = order.roll(-1)
    return following


def continuation(token: int, length: int) -> list[int]:
    """The `length` tokens that the cycle target puts after `token`, an end of sequence ignored."""
    following, tokens = successors().tolist(), []
    for _ in range(length):
        token = following[token]
        tokens.append(token)
    return tokens


def token_before_end(distance: int) -> int:
    """The token after which the cycle target puts the end of sequence as the `distance`-th token."""
    following = successors().tolist()
    return next(token for token in range(NUM_TOKENS) if _after(following, token, distance) == END_TOKEN)


def scattered_vocabulary(target: TargetInfo, draft_size: int) -> dict[str, torch.Tensor]:
    """d2t and t2d of a draft vocabulary that is no prefix of the target's and has the end of sequence."""
    others = torch.randperm(NUM_TOKENS, generator=_generator(3))
    kept = torch.cat([torch.tensor([END_TOKEN]), others[others != END_TOKEN][: draft_size - 1]]).sort().values
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return {"d2t": kept - torch.arange(draft_size), "t2d": t2d}


def identity_vocabulary(target: TargetInfo) -> dict[str, torch.Tensor]:
    """d2t and t2d where the draft has the target's vocabulary."""
    size = target.vocab_size
    return {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}


def draft_config(
    target: TargetInfo, draft_size: int, aux_ids: tuple[int, ...] = AUX_IDS, **options: Any
) -> Eagle3SpeculatorConfig:
    """Configuration of a draft for `target`; options are flags, or fields of the decoder layer."""
    text = target.text_config
    flags = {name: options.pop(name) for name in list(options) if name in Eagle3SpeculatorConfig.model_fields}
    layer = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": text["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": text["num_attention_heads"],
        "num_key_value_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": text["rms_norm_eps"],
        "rope_parameters": text["rope_parameters"],
        "tie_word_embeddings": False,
    }
    return Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig(**layer | options),
        draft_vocab_size=draft_size,
        eagle_aux_hidden_state_layer_ids=list(aux_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target.path, architectures=[target.architecture]),
        ),
        **flags,
    )


def untrained_weights(
    config: Eagle3SpeculatorConfig, target: TargetInfo, t2d: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Randomly initialised parameters, under speculators' names; the LM head has the target's rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Eagle3DraftModel(config)
    weights = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if not any(stranger in name for stranger in STRANGERS)
    }
    weights["lm_head.weight"] = read_lm_head(target)[t2d].float()
    return weights


def cycle_options() -> dict[str, Any]:
    """Options of a draft that can hold the cycle draft's weights."""
    return {"norm_before_residual": True, "num_key_value_heads": 4}


def cycle_weights(
    config: Eagle3SpeculatorConfig, target: TargetInfo, t2d: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Weights of the cycle draft.

    The residual is multiplied by zero, attention looks only at the newest token and hands on its embedding,
    and the MLP adds nothing: the LM head sees the embedding, as the target's does.
    """
    weights = untrained_weights(config, target, t2d)
    hidden = target.hidden_size
    first_half = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    weights["layers.0.hidden_norm.weight"].zero_()
    for name in ("q", "k"):
        weights[f"layers.0.self_attn.{name}_proj.weight"] = ATTENTION_SHARPNESS * first_half
    weights["layers.0.self_attn.v_proj.weight"] = first_half.clone()
    weights["layers.0.self_attn.o_proj.weight"] = torch.eye(hidden)
    weights["layers.0.mlp.down_proj.weight"].zero_()
    return weights


@dataclass
class Factory:
    """A store with a dataset, and drafts exported from it."""

    config: RunConfig
    target: TargetInfo
    dataset: ArtifactRef

    @property
    def store(self) -> LocalStore:
        """The store that holds all artifacts."""
        return LocalStore(self.config.store_path)

    def add_checkpoint(
        self,
        draft: Eagle3SpeculatorConfig | dict[str, Any],
        weights: dict[str, torch.Tensor],
        vocabulary: dict[str, torch.Tensor],
        name: str,
    ) -> ArtifactRef:
        """Write a vocabulary and a checkpoint artifact as prepare and train do."""
        mapping = _plan("vocabulary", name)
        with self.store.writer(mapping) as writer:
            path = writer.folder / "vocabulary.safetensors"
            save_file(vocabulary, path)
            writer.complete([path])
        plan = _plan("checkpoint", name, parents={"vocabulary": mapping.ref})
        with self.store.writer(plan) as writer:
            paths = [writer.folder / "config.json", writer.folder / "model.safetensors"]
            document = draft if isinstance(draft, dict) else draft.to_dict()
            paths[0].write_text(json.dumps(document))
            save_file(weights, paths[1])
            writer.complete(paths)
        return plan.ref

    def export_spec(self, checkpoint: ArtifactRef, **sections: Any) -> StepSpec:
        """What the export step gets for a checkpoint."""
        return self._spec(
            sections, lambda c: plan_export(c, self.target, checkpoint), {"checkpoint": checkpoint}
        )

    def benchmark_spec(self, export: ArtifactRef, **sections: Any) -> StepSpec:
        """What the benchmark step gets for an export."""
        return self._spec(
            sections,
            lambda c: plan_benchmark(c, export, self.dataset, "test"),
            {"export": export, "dataset": self.dataset},
        )

    def _spec(self, sections: dict[str, Any], plan: Any, inputs: dict[str, ArtifactRef]) -> StepSpec:
        document = self.config.model_dump(mode="json")
        for name, value in sections.items():
            document[name] = document[name] | value if isinstance(value, dict) else value
        config = parse_config(document)
        made: ArtifactPlan = plan(config)
        return StepSpec(
            config=config,
            run_id="test",
            target_path=self.target.path,
            outputs={made.kind: made},
            inputs=inputs,
        )


def make_factory(folder: Path, target_path: Path, **benchmark: Any) -> Factory:
    """A factory with a dataset of twelve held-out prompts of two to four tokens.

    To the first six, the cycle target answers with 2, 3, ... 7 tokens; to the others without an end.
    """
    settings = {"num_prompts": 12, "max_tokens": 16, "num_speculative_tokens": 3, "concurrency": 4}
    config = parse_config(
        {
            "name": "serving-test",
            "target": {"model": str(target_path), "aux_layer_ids": list(AUX_IDS)},
            "benchmark": settings | {"measure_speed": False} | benchmark,
            "engine": {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_gib": 1},
            "workspace": str(folder / "workspace"),
        }
    )
    plan = _plan("dataset", "prompts")
    with LocalStore(config.store_path).writer(plan) as writer:
        path = writer.folder / DATASET_FILE
        write_dataset(path, [_prompt(index) for index in range(12)])
        writer.complete([path])
    return Factory(config, inspect_target(target_path), plan.ref)


def silent() -> Progress:
    """Progress of a step that nobody watches."""
    return Progress("test")


def _prompt(index: int) -> Sample:
    random = np.random.default_rng(index)
    ids = random.integers(10, NUM_TOKENS, size=3 + index % 3).astype(np.int32)
    if index < 6:
        ids[-2] = token_before_end(index + 2)
    mask = np.zeros(len(ids), np.uint8)
    mask[-1] = 1
    return Sample(f"prompt-{index}", "question", "heldout", ids, mask, len(ids) - 1, "stop")


def _plan(kind: Any, name: str, parents: dict[str, ArtifactRef] | None = None) -> ArtifactPlan:
    return ArtifactPlan(kind=kind, identity={"test": name}, parents=parents or {})


def _after(following: list[int], token: int, distance: int) -> int:
    for _ in range(distance):
        token = following[token]
    return token


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
