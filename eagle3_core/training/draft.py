"""Builds the draft that is trained: parameters and names of speculators' `Eagle3DraftModel`.

Legend: H hidden size, V target vocabulary, D draft vocabulary, A auxiliary layers.

The embedding, the LM head (unless `draft.train_lm_head`) and the teacher come from single tensors of the
target; nothing is fetched or loaded as a whole model.

Matrices are drawn from N(0, 0.02^2) by the seed, as speculators does. A short run moves a weight by little
more than learning rate x steps, so `initialise` then gives three things the scale that they need at once:

- The states of different layers differ tenfold in size. The blocks of `fc` are divided by the size of the
  layer that they read, so that each contributes alike and the first hidden state has a root mean square of 1.
- The final norm starts at `FINAL_NORM`: flat first logits are cheaper to correct than confident wrong ones.
- Queries and keys start from one projection of the token's embedding, scaled so that a row's score with
  itself is `SELF_SCORE`. The token just read reaches the hidden state only through attention, and so it does
  from the first step; earlier rows with the same token are seen as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3_core.config import RunConfig
from eagle3_core.data.vocabulary import DraftVocabulary
from eagle3_core.errors import TrainingError
from eagle3_core.identity import draft_vocab_size
from eagle3_core.sections import DraftConfig
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import resolve_aux_layer_ids
from eagle3_core.target.weights import read_embedding, read_final_norm, read_lm_head, rms_norm_eps
from eagle3_core.training.loss import Teacher
from eagle3_core.training.ttt import normalise_aux_states

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

TARGET_TENSORS = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the model that are the target's own and never part of a checkpoint."""
FINAL_NORM = 0.5
SELF_SCORE = 16.0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def draft_config(config: RunConfig, target: TargetInfo) -> Eagle3SpeculatorConfig:
    """The speculators configuration of the draft, every EAGLE flag explicit.

    Raises:
        TrainingError: the target's configuration lacks a dimension that the draft needs.
    """
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    draft = config.draft
    return Eagle3SpeculatorConfig(
        transformer_layer_config=_layer_config(config, target),
        draft_vocab_size=draft_vocab_size(config, target),
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        embed_requires_grad=False,
        target_hidden_size=target.hidden_size,
        eagle_aux_hidden_state_layer_ids=list(
            resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)
        ),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=config.benchmark.num_speculative_tokens)
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target.path, architectures=[target.architecture]),
        ),
    )


def _layer_config(config: RunConfig, target: TargetInfo) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    text = target.text_config
    intermediate = config.draft.intermediate_size or text.get("intermediate_size")
    heads = text.get("num_attention_heads")
    if not isinstance(intermediate, int) or not isinstance(heads, int):
        missing = "intermediate_size" if isinstance(heads, int) else "num_attention_heads"
        raise TrainingError(
            f"{target.path}/config.json has no {missing}",
            remedy="set draft.intermediate_size" if missing == "intermediate_size" else None,
        )
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[config.draft.block]
    layer = kind(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=config.draft.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or target.hidden_size // heads,
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings or 2048,
        rms_norm_eps=rms_norm_eps(target),
        rope_parameters=_rope(text),
        bos_token_id=text.get("bos_token_id"),
        eos_token_id=text.get("eos_token_id"),
        tie_word_embeddings=False,
        **_window(config.draft),
    )
    layer._attn_implementation = "eager"
    return layer


def _window(draft: DraftConfig) -> dict[str, Any]:
    """Sliding attention, said for every layer; nothing for full attention."""
    if draft.sliding_window is None:
        return {}
    named = {"use_sliding_window": True} if draft.block == "qwen3" else {}
    types = ["sliding_attention"] * draft.num_layers
    return {"layer_types": types, "sliding_window": draft.sliding_window, **named}


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in transformers 5's form, from that form or the older one."""
    if text.get("rope_parameters"):
        return dict(text["rope_parameters"])
    scaling = dict(text.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    return {"rope_type": kind, "rope_theta": text.get("rope_theta", 10000.0), **scaling}


def build_draft(config: RunConfig, target: TargetInfo, vocabulary: DraftVocabulary) -> Eagle3DraftModel:
    """A new draft in fp32, initialised by `train.seed`.

    Raises:
        TrainingError: the target lacks what the draft needs.
        TargetError: a tensor of the target cannot be read, or its final norm is not of a known kind.
    """
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.random.fork_rng():
        torch.manual_seed(config.train.seed)
        draft = Eagle3DraftModel(draft_config(config, target))
    norm = read_final_norm(target).float()
    head = read_lm_head(target)[torch.from_numpy(vocabulary.draft_to_target)].float()
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(read_embedding(target))
        draft.lm_head.weight.copy_(head)
        draft.verifier_lm_head.weight.copy_(head)
        draft.verifier_norm.weight.copy_(norm)
    if draft.use_draft_vocab:
        draft.load_vocab_mappings(torch.from_numpy(vocabulary.t2d), torch.from_numpy(vocabulary.d2t))
    draft.lm_head.weight.requires_grad_(config.draft.train_lm_head)
    return draft


def target_ids_of(draft: Eagle3DraftModel) -> Tensor:
    """[D] int64, the target id of each draft id, on the draft's device."""
    ids = torch.arange(draft.draft_vocab_size, device=draft.device)
    return ids + draft.d2t.to(draft.device) if draft.use_draft_vocab else ids


def initialise(draft: Eagle3DraftModel, aux_states: Tensor, seed: int) -> None:
    """Scale a new draft to its target; see the module's first lines.

    Args:
        draft: as `build_draft` made it.
        aux_states: [R, A * H] auxiliary states of some samples.
        seed: of the run.
    """
    layer = draft.config.transformer_layer_config
    blocks = normalise_aux_states(draft, aux_states.float()).unflatten(-1, (-1, draft.hidden_size))
    # The median, because the first token's states can be a hundred times larger than all others.
    sizes = blocks.square().mean(-1).sqrt().nanmedian(0).values
    gain = 1.0 / (layer.initializer_range * blocks.shape[1:].numel() ** 0.5 * sizes.clamp_min(1e-6))
    attention = draft.layers[0].self_attn
    groups, depth = layer.num_key_value_heads, layer.head_dim
    std = (SELF_SCORE / depth**0.5 / draft.hidden_size) ** 0.5
    shared = std * torch.randn(
        groups, depth, draft.hidden_size, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        draft.fc.weight.mul_(gain.repeat_interleave(draft.hidden_size))
        draft.norm.weight.fill_(FINAL_NORM)
        attention.k_proj.weight[:, : draft.hidden_size] = shared.flatten(0, 1)
        repeated = shared.repeat_interleave(layer.num_attention_heads // groups, dim=0)
        attention.q_proj.weight[:, : draft.hidden_size] = repeated.flatten(0, 1)


def teacher_of(draft: Eagle3DraftModel, dtype: torch.dtype) -> Teacher:
    """The target's norm and head rows held by a draft, the head in the compute dtype."""
    return Teacher(
        norm=draft.verifier_norm.weight.detach(),
        eps=draft.verifier_norm.variance_epsilon,
        head=draft.verifier_lm_head.weight.detach().to(dtype),
    )


def trained_parameters(draft: Eagle3DraftModel) -> dict[str, torch.nn.Parameter]:
    """Name and parameter of what training changes."""
    return {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}


def checkpoint_tensors(draft: Eagle3DraftModel) -> dict[str, Tensor]:
    """What a finished checkpoint holds: all tensors but the target's own, under speculators' names."""
    return {
        name: tensor.detach().contiguous()
        for name, tensor in draft.state_dict().items()
        if name not in TARGET_TENSORS
    }
