"""The packs of an optimizer step, one after the other on one rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.target.info import TargetInfo
from eagle3_core.training import optimizer_step, train
from eagle3_core.training.matrices import Matrix
from tests.training.runs import Quiet, records_of, spec_of

pytestmark = pytest.mark.engine


def test_a_pack_is_not_computed_beside_what_the_one_before_has_left(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, forward = [], optimizer_step.ttt_forward

    def watched(*args: Any) -> Any:
        left.append(sum(type(each) is Matrix for each in gc.get_objects()))
        return forward(*args)

    monkeypatch.setattr(optimizer_step, "ttt_forward", watched)
    settings = {"pack_tokens": 32, "packs_per_step": 64, "num_epochs": 1}
    spec = spec_of(tmp_path, tiny_target, train=settings)
    train.run(spec, Quiet())  # type: ignore[arg-type]
    assert len(records_of(spec, "step")) == 1
    assert len(left) > 2
    assert set(left) == {0}
