"""What engines need at least, by hand, and the refusal of hosts that have less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import HostError
from eagle3_core.host.gpus import GpuMemory, gpu_memory, visible_gpus
from eagle3_core.memory import (
    GIB,
    MemoryNeed,
    TrainingNeed,
    check_gpus,
    check_host,
    check_training_gpus,
    kv_bytes,
    need_on_gpu,
    need_on_host,
    state_bytes_per_token,
    training_on_gpu,
    training_on_host,
    weight_bytes,
)
from eagle3_core.target.info import TargetInfo, inspect_target
from tests.target.files import LLAMA, LLAMA_FILES, write_sharded

NUM_PARAMETERS = 16 * 8 + 200 * 8 + 8 + 16 * 8


@pytest.fixture
def target(tmp_path: Path) -> TargetInfo:
    """Eight layers, hidden 8, 4 heads and 2 of keys, so head size 2."""
    return inspect_target(write_sharded(tmp_path, LLAMA, LLAMA_FILES))


def config(capture: dict[str, Any] | None = None, max_length: int = 2048, **engine: Any) -> RunConfig:
    document = {"name": "x", "target": {"model": "m"}, "capture": capture or {}, "engine": engine}
    return parse_config(document | {"data": {"max_length": max_length}})


def with_attention(target: TargetInfo, **fields: Any) -> TargetInfo:
    assert target.attention is not None
    return target.model_copy(update={"attention": target.attention.model_copy(update=fields)})


def test_plain_weights_count_in_the_compute_dtype_and_quantised_ones_as_stored(target: TargetInfo) -> None:
    assert weight_bytes(target, "bfloat16") == 2 * NUM_PARAMETERS
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    folder = write_sharded(Path(target.path) / "q", LLAMA | quantised, LLAMA_FILES)
    info = inspect_target(folder)
    assert weight_bytes(info, "bfloat16") == info.weights_bytes > 4 * NUM_PARAMETERS


def test_keys_and_values_of_a_sequence(target: TargetInfo) -> None:
    """A token has two vectors of 2 heads of size 2 in each of eight layers, in bf16."""
    assert kv_bytes(config(), target, 100) == 100 * 8 * (2 * 2 * 2) * 2
    latent = with_attention(target, kind="mla", latent_size=5)
    assert kv_bytes(config(), latent, 100) == 100 * 8 * 5 * 2
    kinds = {"full_attention": 2, "sliding_attention": 5, "linear_attention": 1}
    mixed = with_attention(target, sliding_window=10, layer_kinds=kinds)
    assert kv_bytes(config(), mixed, 100) == (2 * 100 + 5 * 10) * 8 * 2


def test_states_of_a_token_are_three_auxiliary_ones_and_the_final_one(target: TargetInfo) -> None:
    assert state_bytes_per_token(config(), target) == 4 * 8 * 2


def test_the_host_holds_weights_cache_and_shards_in_flight_of_every_replica(target: TargetInfo) -> None:
    capture = {"replicas": 2, "shard_bytes": 4096}
    need = need_on_host(config(capture, kv_cache_gib=2), target, capture_bytes=10**9)
    assert need == MemoryNeed(weights=2 * 2 * NUM_PARAMETERS, kv_cache=4 * GIB, states=2 * 3 * 4096)
    small = need_on_host(config(capture, kv_cache_gib=2), target, capture_bytes=5000)
    assert small.states == 5000
    on_gpu = need_on_host(config(capture, device="cuda"), target, capture_bytes=10**9)
    assert on_gpu == MemoryNeed(weights=0, kv_cache=0, states=2 * 3 * 4096)


def test_gpus_share_weights_and_heads_but_not_latent_vectors(target: TargetInfo) -> None:
    four = config(device="cuda", tensor_parallel_size=4, max_model_len=100, max_length=100)
    need = need_on_gpu(four, target)
    assert need.weights == 2 * NUM_PARAMETERS // 4
    assert need.kv_cache == kv_bytes(four, target, 100) // 2
    assert need.states == 100 * 4 * 8 * 2
    latent = with_attention(target, kind="mla", latent_size=5)
    assert need_on_gpu(four, latent).kv_cache == kv_bytes(four, latent, 100)


def test_a_gpu_holds_the_states_of_the_longest_sample_not_of_the_longest_answer(target: TargetInfo) -> None:
    """Keys and values of a token take 128 bytes, its states 64."""
    long = need_on_gpu(config(device="cuda", max_model_len=1000, max_length=100), target)
    assert (long.kv_cache, long.states) == (1000 * 128, 0)
    short = need_on_gpu(config(device="cuda", max_model_len=120, max_length=100), target)
    assert (short.kv_cache, short.states) == (100 * 128, 100 * 64)


TRAINED = 3 * 8 * 8 + 8 + 16 * (4 + 2 * 2) * 2 + 4 * 2 * 8 + 3 * 8 * 20 + 3 * 8
"""fc with its norm; queries, keys and values of two states; output; MLP; norms of the layer."""


def training_config(device: str = "cuda", **train: Any) -> RunConfig:
    draft = {"vocab_size": 10, "intermediate_size": 20}
    document = {"name": "x", "target": {"model": "m"}, "draft": draft, "train": train}
    return parse_config(document | {"engine": {"device": device}})


def test_a_gpu_that_trains_holds_sixteen_bytes_a_parameter_and_frozen_heads_unless_ranks_share(
    target: TargetInfo,
) -> None:
    frozen = 4 * (16 * 8 + 2 * 10 * 8)
    one = training_on_gpu(training_config(), target, 1)
    assert one == TrainingNeed(state=16 * TRAINED, frozen=frozen, copies=0)
    assert training_on_gpu(training_config(), target, 4).state == 16 * TRAINED // 4
    assert training_on_gpu(training_config(parallel="ddp"), target, 4).state == 16 * TRAINED
    assert training_on_gpu(training_config(optimizer="muon"), target, 1).state == 12 * TRAINED


def test_the_host_holds_two_copies_of_a_checkpoint_and_on_the_cpu_every_ranks_draft(
    target: TargetInfo,
) -> None:
    on_host = training_on_host(training_config(num_ranks=2, packs_per_step=2), target, 2)
    assert on_host == TrainingNeed(state=0, frozen=0, copies=24 * TRAINED)
    on_cpu = training_on_host(training_config("cpu", num_ranks=2, packs_per_step=2), target, 2)
    assert (on_cpu.state, on_cpu.copies) == (2 * 16 * TRAINED, 24 * TRAINED)


def test_too_little_memory_for_training_is_refused_with_both_numbers_in_one_line() -> None:
    need = TrainingNeed(state=64 * GIB, frozen=12 * GIB, copies=0)
    check_training_gpus(need, [GpuMemory(device="0", total_bytes=96 * GIB, free_bytes=0)])
    with pytest.raises(HostError, match=r"GPU 1 has 40\.0 GiB; expected at least 76\.0 GiB .*fsdp2"):
        check_training_gpus(need, [GpuMemory(device="1", total_bytes=40 * GIB, free_bytes=0)])
    copies = TrainingNeed(state=0, frozen=0, copies=30 * GIB)
    check_host(copies, 30 * GIB)
    with pytest.raises(HostError) as caught:
        check_host(copies, 24 * GIB)
    assert str(caught.value).startswith(
        "24.0 GiB of memory are available; expected at least 30.0 GiB for training (30.0 GiB of checkpoint "
        "copies); end other programs"
    )


NEED = MemoryNeed(weights=70 * GIB, kv_cache=2 * GIB, states=0)


def test_a_host_with_too_little_memory_is_refused_with_both_numbers() -> None:
    check_host(NEED, 72 * GIB)
    with pytest.raises(HostError) as caught:
        check_host(NEED, 24 * GIB)
    assert str(caught.value).startswith(
        "24.0 GiB of memory are available; expected at least 72.0 GiB (70.0 GiB of weights + 2.0 GiB of KV "
        "cache); end other programs"
    )
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_too_small_or_held_by_others_is_refused() -> None:
    settings = config(device="cuda", gpu_memory_utilization=0.5)
    roomy = GpuMemory(device="0", total_bytes=160 * GIB, free_bytes=150 * GIB)
    check_gpus(settings, NEED, [roomy])
    small = GpuMemory(device="1", total_bytes=80 * GIB, free_bytes=80 * GIB)
    with pytest.raises(HostError, match=r"GPU 1 has 80\.0 GiB, .* use 40\.0 .*at least 72\.0 GiB .*raise"):
        check_gpus(settings, NEED, [roomy, small])
    held = GpuMemory(device="0", total_bytes=160 * GIB, free_bytes=20 * GIB)
    with pytest.raises(HostError, match=r"GPU 0 has 20\.0 GiB free; expected 80\.0 GiB.*CUDA_VISIBLE"):
        check_gpus(settings, NEED, [held])


def test_without_a_driver_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_memory(["0"]) is None
    assert visible_gpus() == []
    assert visible_gpus("3, 5") == ["3", "5"]


def test_gpus_are_named_up_to_the_first_entry_that_is_none() -> None:
    """As CUDA reads them."""
    assert visible_gpus("2,-1,3") == ["2"]
    assert visible_gpus("-1") == visible_gpus("") == []


def test_memory_is_asked_of_the_visible_gpus_by_index_or_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    sizes = {"by index 1": (80, 60), "by name GPU-x": (40, 30)}

    class Memory:
        def __init__(self, handle: str) -> None:
            self.total, self.free = (size * GIB for size in sizes[handle])

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"by index {index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda name: f"by name {name}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", Memory)
    found = gpu_memory(["1", "GPU-x"])
    assert found is not None
    assert [(gpu.total_bytes // GIB, gpu.free_bytes // GIB) for gpu in found] == [(80, 60), (40, 30)]
