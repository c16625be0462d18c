"""Reading a trained draft: every name, shape and mapping is held against what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core.errors import ExportError
from eagle3_core.serving.draft import check_mapping, check_tensors, parameter_shapes
from eagle3_core.target.info import TargetInfo, inspect_target
from tests.serving.drafts import draft_config, scattered_vocabulary, untrained_weights
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_fc": True},
    {"fc_norm": True, "num_hidden_layers": 2},
    {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return inspect_target(make_tiny_target(tmp_path_factory.mktemp("target"), num_layers=4))


@pytest.mark.parametrize("options", VARIANTS)
def test_the_expected_parameters_are_those_of_speculators(
    target: TargetInfo, options: dict[str, Any]
) -> None:
    config = draft_config(target, 64, **options)
    weights = untrained_weights(config, target, scattered_vocabulary(target, 64)["t2d"])

    assert parameter_shapes(config.to_dict()) == {name: tuple(t.shape) for name, t in weights.items()}


def test_problems_of_all_tensors_are_named_at_once() -> None:
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan]), "d": torch.ones(1)}

    with pytest.raises(ExportError) as raised:
        check_tensors(tensors, {"a": (3,), "b": (2,), "c": (1,)}, Path("file"))

    assert str(raised.value) == (
        "file: c is missing; d does not belong there; a has shape (2,) instead of (3,); b is not finite"
    )


def test_a_mapping_that_leads_to_the_marked_tokens_passes() -> None:
    check_mapping(_mapping([3, 4, 7]), 3, 12, Path("file"))


@pytest.mark.parametrize("d2t", [[0, 0, 0], [7, 4, 3], [3, 4, 8]])
def test_a_mapping_that_contradicts_the_mask_is_refused(d2t: list[int]) -> None:
    with pytest.raises(ExportError, match="does not lead to the 3 target tokens"):
        check_mapping(_mapping(d2t), 3, 12, Path("file"))


def test_a_missing_half_of_the_mapping_is_refused() -> None:
    mapping = _mapping([3, 4, 7])
    del mapping["t2d"]

    with pytest.raises(ExportError, match="lacks t2d"):
        check_mapping(mapping, 3, 12, Path("file"))


def _mapping(d2t: list[int]) -> dict[str, torch.Tensor]:
    t2d = torch.zeros(12, dtype=torch.bool)
    t2d[[3, 5, 9]] = True
    return {"d2t": torch.tensor(d2t), "t2d": t2d}
