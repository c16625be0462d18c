"""How many engines run side by side and what each gets; no engine and no torch."""

from __future__ import annotations

import pytest

from eagle3_core.capture.replica import num_replicas, replica_variables
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError


def config(capture: dict[str, object], tensor_parallel_size: int = 1) -> RunConfig:
    engine = {"device": "cuda", "tensor_parallel_size": tensor_parallel_size}
    return RunConfig.model_validate(
        {"name": "t", "target": {"model": "m"}, "capture": capture, "engine": engine}
    )


@pytest.mark.parametrize(
    ("capture", "size", "num_gpus", "expected"),
    [
        ({}, 1, 4, 4),
        ({}, 2, 5, 2),
        ({"replicas": 3}, 1, 4, 3),
        ({"engine": "sglang"}, 2, 4, 2),
        ({"engine": "sglang", "sglang_port": 30000}, 1, 4, 1),
        ({"engine": "vllm", "sglang_port": 30000}, 1, 4, 4),
    ],
)
def test_engines_fill_the_gpus_unless_a_number_is_set_or_all_would_serve_on_one_port(
    capture: dict[str, object], size: int, num_gpus: int, expected: int
) -> None:
    assert num_replicas(config(capture, size), [str(index) for index in range(num_gpus)]) == expected


def test_each_engine_gets_gpus_of_its_own_as_they_are_named() -> None:
    variables = replica_variables(config({}, 2), 2, ["4", "5", "GPU-a", "GPU-b", "7"])
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == ["4,5", "GPU-a,GPU-b"]


def test_more_engines_than_the_gpus_hold_are_refused() -> None:
    with pytest.raises(CaptureError, match="3 GPUs are visible; expected 4 for 2 engines of 2 GPUs each"):
        replica_variables(config({"replicas": 2}, 2), 2, ["0", "1", "2"])
