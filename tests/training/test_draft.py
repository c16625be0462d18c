"""What a new draft takes from its target, and how it is scaled."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.target.info import TargetInfo
from eagle3_core.target.weights import read_embedding, read_final_norm
from eagle3_core.training.draft import (
    FINAL_NORM,
    SELF_SCORE,
    build_draft,
    initialise,
    teacher_of,
    trained_parameters,
)
from eagle3_core.training.ttt import fuse_aux_states
from tests.training.examples import make_config, make_vocabulary

pytestmark = pytest.mark.engine
FROZEN = {"embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight"}


def _states(target: TargetInfo) -> torch.Tensor:
    """[40, 3 * H]: three layers of sizes 1, 5 and 20, and a first token that is a hundred times larger."""
    states = torch.randn(40, 3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    states *= torch.tensor([1.0, 5.0, 20.0]).view(1, 3, 1)
    states[0] *= 100
    return states.flatten(1)


def test_heads_are_the_targets_rows_of_the_draft_vocabulary(tiny_target: TargetInfo) -> None:
    vocabulary = make_vocabulary(64, tiny_target.vocab_size)
    draft = build_draft(make_config(), tiny_target, vocabulary)
    rows = read_embedding(tiny_target)[torch.from_numpy(vocabulary.draft_to_target)]
    assert torch.equal(draft.lm_head.weight, rows)
    assert torch.equal(draft.embed_tokens.weight, read_embedding(tiny_target))
    assert set(dict(draft.named_parameters())) - set(trained_parameters(draft)) == FROZEN
    teacher = teacher_of(draft, torch.float32)
    assert torch.equal(teacher.head, rows)
    assert torch.equal(teacher.norm, read_final_norm(tiny_target))


def test_the_lm_head_is_trained_when_asked(tiny_target: TargetInfo) -> None:
    vocabulary = make_vocabulary(64, tiny_target.vocab_size)
    draft = build_draft(make_config(draft={"train_lm_head": True}), tiny_target, vocabulary)
    assert "lm_head.weight" in trained_parameters(draft)


def test_a_full_vocabulary_has_no_mapping(tiny_target: TargetInfo) -> None:
    size = tiny_target.vocab_size
    draft = build_draft(make_config(draft={"vocab_size": None}), tiny_target, make_vocabulary(size, size))
    assert not {"d2t", "t2d"} & set(draft.state_dict())


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_every_layer_contributes_alike_to_a_first_state_of_size_one(
    tiny_target: TargetInfo, flags: dict
) -> None:
    vocabulary = make_vocabulary(64, tiny_target.vocab_size)
    draft = build_draft(make_config(draft=flags), tiny_target, vocabulary)
    states = _states(tiny_target)
    initialise(draft, states, seed=0)
    with torch.no_grad():
        hidden = fuse_aux_states(draft, states)[1:]
        alone = []
        for number in range(3):
            part = torch.zeros_like(states).unflatten(1, (3, -1))
            part[:, number] = states.unflatten(1, (3, -1))[:, number]
            alone.append(fuse_aux_states(draft, part.flatten(1))[1:].square().mean().sqrt().item())
    assert hidden.square().mean().sqrt().item() == pytest.approx(1.0, rel=0.15)
    if not flags.get("norm_before_fc"):  # normalised together, a part alone is not the part of the whole
        assert alone == pytest.approx([3**-0.5] * 3, rel=0.15)
    assert draft.norm.weight.eq(FINAL_NORM).all()


def test_a_row_attends_first_to_its_own_token(tiny_target: TargetInfo) -> None:
    draft = build_draft(make_config(), tiny_target, make_vocabulary(64, tiny_target.vocab_size))
    initialise(draft, _states(tiny_target), seed=0)
    attention, size = draft.layers[0].self_attn, tiny_target.hidden_size
    with torch.no_grad():
        tokens = draft.layers[0].input_layernorm(draft.embed_tokens(torch.arange(200)))
        queries = (tokens @ attention.q_proj.weight[:, :size].T).view(200, 4, 16)
        keys = (tokens @ attention.k_proj.weight[:, :size].T).view(200, 2, 16).repeat_interleave(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * attention.scaling
    own = scores.diagonal(dim1=1, dim2=2)
    assert own.mean().item() == pytest.approx(SELF_SCORE, rel=0.1)
    assert abs(scores.mean().item()) < 0.1 * SELF_SCORE


def test_a_seed_gives_the_same_draft_again(tiny_target: TargetInfo) -> None:
    vocabulary = make_vocabulary(64, tiny_target.vocab_size)
    drafts = []
    for seed in (3, 3, 4):
        draft = build_draft(make_config(train={"seed": seed}), tiny_target, vocabulary)
        initialise(draft, _states(tiny_target), seed)
        drafts.append(draft.state_dict())
    assert all(torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])
    assert not torch.equal(
        drafts[0]["layers.0.self_attn.k_proj.weight"], drafts[2]["layers.0.self_attn.k_proj.weight"]
    )
