"""The hooks on modules and batches like SGLang's; they import nothing of SGLang, so it is not needed here.

`EAGLE3_TEST_DEVICE=cuda` runs them on a GPU.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_core.capture.job import FAILURE_NAME, CaptureJob, capture_layout
from eagle3_core.capture.sglang_batch import check_rid, sample_rid
from eagle3_core.capture.sglang_hook import residual_sum
from eagle3_core.capture.sglang_plan import READY_NAME, Variant, hook_specs
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import ShardReader, plan_shards
from eagle3_core.target.info import inspect_target
from tests.capture.runs import capture_spec, make_samples
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

NUM_LAYERS, HIDDEN = 8, 128
DEVICE = os.environ.get("EAGLE3_TEST_DEVICE", "cpu")


class Layer(torch.nn.Module):
    """A decoder layer that returns hidden and residual, as SGLang's do: their sum grows by 1 a layer."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(hidden), residual + hidden


class Norm(torch.nn.Module):
    """Adds in place, as SGLang's norms do."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual += hidden
        hidden.zero_()
        return hidden, residual


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = Norm()
        self.layers_to_capture: list[int] = []

    def forward(self, embedded: torch.Tensor) -> Any:
        hidden, residual, captured = embedded, torch.zeros_like(embedded), []
        for index, layer in enumerate(self.layers):
            if index in self.layers_to_capture:
                captured.append(hidden + residual)
            hidden, residual = layer(hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, captured) if captured else hidden


class LogitsProcessor(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor | None, hidden: torch.Tensor, head: None, batch: Any) -> None:
        assert isinstance(hidden, torch.Tensor)


class Model(torch.nn.Module):
    """State k is (embedding, here the token id) + k in every column."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.logits_processor = LogitsProcessor()
        self.embeds_itself = False

    def run(self, ids: list[int], batch: Any) -> None:
        batch.input_ids = tokens = torch.tensor(ids, device=DEVICE)
        embedded = tokens.float()[:, None].expand(-1, HIDDEN).clone()
        self.logits_processor(None if self.embeds_itself else tokens, self.model(embedded), None, batch)


def batch(rids: list[str], lengths: list[int], offsets: list[int], mode: str = "extend") -> Any:
    forward_mode = SimpleNamespace(
        is_decode_or_idle=lambda: mode == "decode", is_extend=lambda: mode == "extend"
    )
    return SimpleNamespace(
        rids=rids, extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=offsets, forward_mode=forward_mode
    )


class Capture:
    """A job over two samples of 5 and 3 tokens, with hooks on a model."""

    def __init__(self, root: Path, variant: Variant, without: str = "") -> None:
        target = make_tiny_target(root / "target")
        spec = capture_spec(root, target, make_samples([5, 3]), capture={"final_state": "all"})
        self.folder = root / "session"
        self.folder.mkdir()
        dataset = LocalStore(spec.config.store_path).folder(spec.inputs["dataset"])
        self.samples: list[Sample] = make_samples([5, 3])
        layout = capture_layout(spec.config, inspect_target(target))
        self.job = CaptureJob(
            engine="sglang-under-test",
            dataset_folder=str(dataset),
            folder=str(self.folder),
            layout=layout,
            shards=tuple(plan_shards(self.samples, layout, 1 << 20)),
        )
        self.model = Model()
        modules = dict(self.model.named_modules())
        for hook in hook_specs(self.job, variant):
            module_name, factory = hook["hook_factory"].split(":")
            made = getattr(__import__(module_name, fromlist=[factory]), factory)(hook["config"])
            for name, module in modules.items():
                if name in hook["target_modules"] and name != without:
                    module.register_forward_hook(made)

    def ids(self, index: int) -> list[int]:
        return self.samples[index].input_ids.tolist()

    def check(self) -> None:
        self.model.run([1, 2], batch([check_rid(0)], [2], [0]))

    def wait(self, name: str) -> Path:
        deadline = time.monotonic() + 120
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.01)
        return self.folder / name

    def failure(self) -> str:
        return json.loads(self.wait(FAILURE_NAME).read_text())["found"]


@pytest.mark.parametrize(("variant", "wrapped"), [("layers", False), ("model", False), ("layers", True)])
def test_rows_of_mixed_batches_reach_their_samples(tmp_path: Path, variant: Variant, wrapped: bool) -> None:
    capture = Capture(tmp_path, variant)
    capture.model.embeds_itself = wrapped  # a multimodal wrapper passes embeddings on, and no ids
    capture.check()
    if variant == "model":
        assert not (capture.folder / READY_NAME).exists()
        capture.check()
    assert (capture.folder / READY_NAME).exists()
    first, second = capture.ids(0), capture.ids(1)
    capture.model.run([9], batch([sample_rid(0)], [], [], mode="decode"))
    capture.model.run([*first[:2], 7, 7], batch([sample_rid(0), "HEALTH_CHECK_1"], [2, 1], [0, 0]))
    capture.model.run([*second, *first[2:], 0, 0], batch([sample_rid(1), sample_rid(0)], [3, 3], [0, 2]))
    reader = ShardReader(capture.wait(capture.job.shards[0].file_name))
    for index, ids in enumerate((first, second)):
        stored, tokens = reader.sample(index), torch.tensor(ids).float()
        for place, capture_id in enumerate((2, 4, 5)):
            assert torch.equal(stored.aux_states[:, place], (tokens + capture_id)[:, None].expand(-1, HIDDEN))
        assert torch.equal(stored.final_states, (tokens + NUM_LAYERS)[:, None].expand(-1, HIDDEN))
    assert not (capture.folder / FAILURE_NAME).exists()


def test_a_wrong_id_is_named_and_nothing_is_written_for_its_shard(tmp_path: Path) -> None:
    capture = Capture(tmp_path, "layers")
    wrong = capture.ids(0)
    wrong[3] += 1
    capture.model.run(wrong, batch([sample_rid(0)], [5], [0]))
    assert f"sample sample-000: sglang-under-test ran token {wrong[3]} at position 3" in capture.failure()


def test_rows_from_a_prefix_cache_are_refused(tmp_path: Path) -> None:
    capture = Capture(tmp_path, "layers")
    capture.model.run(capture.ids(0)[2:], batch([sample_rid(0)], [3], [2]))
    assert "sample sample-000: sglang-under-test computed rows 2 to 5 of 5 tokens" in capture.failure()


def test_a_layer_without_a_hook_is_found_by_the_check(tmp_path: Path) -> None:
    capture = Capture(tmp_path, "layers", without="model.layers.3")
    capture.check()
    assert "the states of capture ids [4]" in capture.failure()
    assert not (capture.folder / READY_NAME).exists()


def test_a_model_that_cannot_capture_its_own_states_is_named(tmp_path: Path) -> None:
    capture = Capture(tmp_path, "model")
    del capture.model.model.layers_to_capture
    capture.model.model.forward = lambda embedded: embedded  # type: ignore[method-assign]
    capture.check()
    assert "Inner cannot capture its own states" in capture.failure()


def test_a_state_is_hidden_plus_residual_in_memory_of_its_own() -> None:
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert torch.equal(residual_sum((hidden, residual, None)), torch.full((2, 3), 3.0))
    for output in (hidden, (hidden,), (hidden, None)):
        state = residual_sum(output)
        assert torch.equal(state, hidden)
        assert state.data_ptr() != hidden.data_ptr()


def test_outputs_that_are_no_state_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"returns \(dict\)"):
        residual_sum(({"hidden": 1},))
    with pytest.raises(CaptureError, match=r"returns \(\(2, 3\), \(4, 3\)\)"):
        residual_sum((torch.ones(2, 3), torch.ones(4, 3)))
    partial = torch.ones(2, 3)
    partial._sglang_needs_allreduce_fusion = True  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="partial sums"):
        residual_sum((partial, torch.ones(2, 3)))
