"""Gradients leave in a fixed order, most of them before the backward pass has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from benchmarks.train_sides import SHAPES, make_draft, make_samples, ours
from eagle3_core.training.draft import teacher_of, trained_parameters
from eagle3_core.training.gradients import GradientSender, Group, begin_sum, grouped, sending_order
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import pack_loss, step_weights
from eagle3_core.training.ttt import ttt_forward

pytestmark = pytest.mark.engine


class Recorder:
    """Notes which groups were sent, and which gradients were there at that moment."""

    def __init__(self, parameters: dict[str, Parameter]) -> None:
        self.parameters = parameters
        self.sent: list[Group] = []
        self.complete: list[set[str]] = []
        self.waited: list[Group] = []

    def __call__(self, group: Group) -> Any:
        self.sent.append(group)
        self.complete.append({name for name, each in self.parameters.items() if each.grad is not None})
        return lambda: self.waited.append(group)


def sender_of(parameters: dict[str, Parameter], limit: int) -> tuple[GradientSender, Recorder, list[Group]]:
    recorder = Recorder(parameters)
    groups = grouped({name: parameters[name] for name in sending_order(parameters)}, limit)
    return GradientSender(parameters, groups, recorder), recorder, groups


def test_small_gradients_share_a_message_and_large_ones_stand_alone() -> None:
    parameters = {
        name: Parameter(torch.zeros(size)) for name, size in zip("abcd", (3, 4, 20, 5), strict=True)
    }
    assert grouped(parameters, limit=8) == [["a", "b"], ["c"], ["d"]]


def test_matrices_of_a_draft_leave_while_others_are_still_computed() -> None:
    torch.manual_seed(0)
    shape = SHAPES["cpu-small"]
    draft = make_draft(shape, "cpu")
    forward, _ = ours(draft, make_samples(shape, 0.5), 3, "cpu")
    sender, recorder, groups = sender_of(trained_parameters(draft), limit=1)
    with sender.early():
        forward().backward()
    assert recorder.sent == groups
    first, last = recorder.complete[0], recorder.complete[-1]
    assert recorder.sent[0] == ["fc.weight"]
    down, query = "layers.0.mlp.down_proj.weight", "layers.0.self_attn.q_proj.weight"
    assert {down, query} & first == set()
    assert query not in recorder.complete[groups.index([down])]
    assert last == set(trained_parameters(draft))
    assert recorder.waited == []
    sender.finish()
    assert recorder.sent == recorder.waited == groups


def test_a_trained_lm_head_leaves_before_the_backward_pass_reaches_the_layers() -> None:
    torch.manual_seed(0)
    shape = SHAPES["cpu-small"]
    draft = make_draft(shape, "cpu")
    draft.lm_head.weight.requires_grad_(True)
    pack, teacher = build_pack(make_samples(shape, 0.5), 2), teacher_of(draft, torch.bfloat16)
    sender, recorder, groups = sender_of(trained_parameters(draft), limit=1)
    hidden, weights = ttt_forward(draft, pack, torch.bfloat16), step_weights(pack.plan.counts, 1.0)
    parts = pack_loss(hidden, draft.lm_head.weight, pack.final_states, teacher, pack.plan, weights)
    with sender.early():
        parts.loss.backward()
    assert recorder.sent[0] == ["lm_head.weight"]
    assert recorder.complete[0] == {"lm_head.weight"}
    assert recorder.sent == groups


def test_a_group_waits_for_those_before_it_and_a_missing_gradient_becomes_zeros() -> None:
    parameters = {name: Parameter(torch.ones(2, 2)) for name in "abc"}
    sender, recorder, _ = sender_of(parameters, limit=1)
    with sender.early():
        (parameters["a"].sum() + 2 * parameters["b"].sum()).backward()
    assert recorder.sent == []  # `c` is the first one to leave
    sender.finish()
    assert recorder.sent == recorder.waited == [["c"], ["b"], ["a"]]
    assert {name: float(each.grad.sum()) for name, each in parameters.items()} == {"a": 4, "b": 8, "c": 0}


def test_a_backward_pass_after_the_last_one_sends_nothing() -> None:
    parameters = {"a": Parameter(torch.ones(2, 2))}
    sender, recorder, _ = sender_of(parameters, limit=1)
    with sender.early():
        parameters["a"].sum().backward()
    sender.finish()
    parameters["a"].sum().backward()
    assert recorder.sent == [["a"]]


def test_tensors_are_summed_in_place(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        tensors = [torch.ones(2, 3), torch.full((4,), 2.0), torch.ones(6).view(2, 3).T]
        for each in (tensors, tensors[2:]):
            wait = begin_sum(each)
            wait()
        assert [float(each.sum()) for each in tensors] == [6, 8, 6]
    finally:
        torch.distributed.destroy_process_group()
