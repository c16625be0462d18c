"""Labels of a capture: made once, against logits of the whole vocabulary, and read with the samples."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_core.config import ObjectRoot
from eagle3_core.contracts import StepSpec
from eagle3_core.data.vocabulary import load_vocabulary
from eagle3_core.errors import StoreError, TrainingError
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store.labels import LabelSource
from eagle3_core.store.local import LocalStore
from eagle3_core.store.remote import RemoteStore
from eagle3_core.store.samples import SamplePlace, SampleSource
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.labels import LabelMaker, make_labels
from eagle3_core.training.loader import PackReader, StoredSample, build_pack, label_states
from tests.doubles.s3 import BUCKET, running_s3
from tests.training.examples import make_vocabulary, random_sample
from tests.training.runs import Quiet, spec_of

pytestmark = pytest.mark.engine


class Heads:
    """Loads the target's head, and counts how often."""

    def __init__(self, target: TargetInfo) -> None:
        self.target, self.loaded = target, 0

    def __call__(self) -> FinalHead:
        self.loaded += 1
        return FinalHead(self.target)


@pytest.fixture
def spec(tmp_path: Path, tiny_target: TargetInfo) -> StepSpec:
    return spec_of(tmp_path, tiny_target)


def make(spec: StepSpec, heads: Heads, progress: Any = None) -> tuple[SampleSource, LabelSource]:
    store = LocalStore(spec.config.store_path)
    capture = store.read(spec.inputs["capture"])
    source = SampleSource(store, capture)
    vocabulary = load_vocabulary(store.fetch(spec.inputs["vocabulary"]))
    labels = make_labels(
        store, spec.outputs["labels"], "run", source, capture, vocabulary, heads, progress or Quiet()
    )
    return source, labels


def all_labels(source: SampleSource, labels: LabelSource) -> dict[str, Any]:
    return {
        key: labels.sample(SamplePlace(name, number), key)
        for name, shard in source.load().items()
        for number, key in enumerate(shard.keys)
    }


def test_labels_are_the_choice_over_all_tokens_and_the_draft_vocabularys_share(
    spec: StepSpec, tiny_target: TargetInfo
) -> None:
    source, labels = make(spec, Heads(tiny_target))
    store, head = LocalStore(spec.config.store_path), FinalHead(tiny_target)
    inside = torch.from_numpy(load_vocabulary(store.fetch(spec.inputs["vocabulary"])).t2d)
    outside = 0
    for name, shard in source.load().items():
        for number, key in enumerate(shard.keys):
            place = SamplePlace(name, number)
            probabilities = head.final_logits(label_states(source.sample(place))).double().softmax(-1)
            found = labels.sample(place, key)
            assert np.array_equal(found.argmax, probabilities.argmax(-1).numpy())
            assert found.share == pytest.approx(probabilities[:, inside].sum(-1).numpy(), abs=1e-6)
            outside += int((~inside[found.argmax]).sum())
    facts = store.read(spec.outputs["labels"].ref).facts
    assert facts["num_outside"] == outside > 0
    assert 0 < facts["draft_vocabulary_share"] < 1


def test_a_draft_with_the_whole_vocabulary_has_the_whole_probability(tiny_target: TargetInfo) -> None:
    whole = make_vocabulary(tiny_target.vocab_size, tiny_target.vocab_size)
    maker = LabelMaker(FinalHead(tiny_target), whole)
    (found,) = maker.labels([torch.randn(7, tiny_target.hidden_size)])
    assert found.share == pytest.approx(np.ones(7), abs=1e-6)


def test_finished_labels_are_not_made_again(spec: StepSpec, tiny_target: TargetInfo) -> None:
    heads = Heads(tiny_target)
    make(spec, heads)
    first = LocalStore(spec.config.store_path).read(spec.outputs["labels"].ref)
    make(spec, heads)
    assert heads.loaded == 1
    assert LocalStore(spec.config.store_path).read(spec.outputs["labels"].ref) == first


def test_an_interrupted_making_goes_on_with_the_next_shard(spec: StepSpec, tiny_target: TargetInfo) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(spec, Heads(tiny_target), stop)
    folder = LocalStore(spec.config.store_path).folder(spec.outputs["labels"].ref)
    (first,) = folder.glob("*.safetensors")
    made_at = first.stat().st_mtime_ns
    source, labels = make(spec, Heads(tiny_target))
    assert len(all_labels(source, labels)) == 16
    assert first.stat().st_mtime_ns == made_at


def test_only_the_labels_of_a_shard_that_was_made_again_are_made_again(
    spec: StepSpec, tiny_target: TargetInfo
) -> None:
    make(spec, Heads(tiny_target))
    store = LocalStore(spec.config.store_path)
    folder, capture = store.folder(spec.outputs["labels"].ref), spec.inputs["capture"]
    made_at = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    manifest = store.folder(capture) / "manifest.json"
    entry = store.read(capture).file("shard-00001.safetensors")
    assert entry is not None
    manifest.write_text(manifest.read_text().replace(entry.xxh3_128, "0" * 32))
    make(spec, Heads(tiny_target))
    again = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert [name for name in made_at if made_at[name] != again[name]] == ["shard-00001.safetensors"]
    assert store.read(spec.outputs["labels"].ref).state == "complete"


def test_who_finds_labels_being_made_waits_and_makes_none(
    spec: StepSpec, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than others wait for a folder: the labels of a large capture take a while."""
    monkeypatch.setattr(LocalStore.writer.__wrapped__, "__defaults__", (None, 0.0))  # type: ignore[attr-defined]
    is_making, may_go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        is_making.set()
        assert may_go_on.wait(120)

    late = Heads(tiny_target)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make, spec, Heads(tiny_target), slow)
        assert is_making.wait(120)
        second = pool.submit(make, spec, late)
        with pytest.raises(TimeoutError):
            second.result(1.0)
        may_go_on.set()
        assert len(all_labels(*first.result())) == len(all_labels(*second.result())) == 16
    assert late.loaded == 0


def test_rows_that_are_not_finite_are_counted_apart_and_labels_beside_them_are_made_again(
    spec: StepSpec, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that verification leaves out stays in its shard."""
    read = SampleSource.sample

    def spoiled(self: SampleSource, place: SamplePlace) -> Any:
        sample = read(self, place)
        if sample.key == "sample-1":
            sample.final_states[0] = float("nan")
        return sample

    monkeypatch.setattr(SampleSource, "sample", spoiled)
    make(spec, Heads(tiny_target))
    store = LocalStore(spec.config.store_path)
    facts = store.read(spec.outputs["labels"].ref).facts
    assert facts["num_nonfinite"] == 1
    assert 0 < facts["draft_vocabulary_share"] < 1
    (store.folder(spec.outputs["labels"].ref) / "shard-00001.safetensors").unlink()
    make(spec, Heads(tiny_target))
    assert store.read(spec.outputs["labels"].ref).facts == facts


def test_labels_in_a_bucket_are_read_from_it_and_renewed_there(
    spec: StepSpec, tiny_target: TargetInfo, tmp_path: Path
) -> None:
    """Made by one host, read by another whose mirror is empty, and made anew where the shard changed."""
    capture = LocalStore(spec.config.store_path).read(spec.inputs["capture"])
    source = SampleSource(LocalStore(spec.config.store_path), capture)
    vocabulary = make_vocabulary(64, tiny_target.vocab_size)
    settings = {"region": "us-east-1", "attempts": 2}
    plan, heads = spec.outputs["labels"], Heads(tiny_target)
    with running_s3() as server:
        server.reset()
        endpoint = ObjectStoreConfig.model_validate({"endpoint_url": server.url} | settings)
        first, second = (
            RemoteStore(ObjectRoot(BUCKET, "store"), tmp_path / host, endpoint) for host in ("one", "two")
        )
        make_labels(first, plan, "run", source, capture, vocabulary, heads, Quiet())  # type: ignore[arg-type]
        again = make_labels(second, plan, "run", source, capture, vocabulary, heads, Quiet())  # type: ignore[arg-type]
        assert heads.loaded == 1
        before = all_labels(source, again)
        renamed = capture.files[0].model_copy(update={"xxh3_128": "0" * 32})
        changed = capture.model_copy(update={"files": (renamed, *capture.files[1:])})
        third = make_labels(second, plan, "run", source, changed, vocabulary, heads, Quiet())  # type: ignore[arg-type]
        assert heads.loaded == 2
        manifest = first.read(plan.ref)
        assert [entry.facts["shard_xxh3_128"] for entry in manifest.files] == [
            entry.xxh3_128 for entry in changed.files
        ]
        after = all_labels(source, third)
    assert all(np.array_equal(before[key].share, after[key].share) for key in before)


def test_damaged_labels_are_refused_by_name_and_then_made_again(
    spec: StepSpec, tiny_target: TargetInfo
) -> None:
    source, labels = make(spec, Heads(tiny_target))
    good = all_labels(source, labels)
    path = LocalStore(spec.config.store_path).folder(spec.outputs["labels"].ref) / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["labels"].ref)
    fresh = LabelSource(LocalStore(spec.config.store_path), manifest)
    with pytest.raises(StoreError, match=r"labels/.*/shard-00000.safetensors does not match its hash"):
        fresh.sample(SamplePlace("shard-00000.safetensors", 0), "sample-0")
    again = all_labels(*make(spec, Heads(tiny_target)))
    assert all(np.array_equal(good[key].argmax, again[key].argmax) for key in good)


def test_labels_of_another_sample_are_refused(spec: StepSpec, tiny_target: TargetInfo) -> None:
    _, labels = make(spec, Heads(tiny_target))
    with pytest.raises(StoreError, match="the labels of sample-1 do not match"):
        labels.sample(SamplePlace("shard-00000.safetensors", 0), "sample-1")


def test_a_pack_has_the_labels_of_its_samples_side_by_side(spec: StepSpec, tiny_target: TargetInfo) -> None:
    source, labels = make(spec, Heads(tiny_target))
    keys = source.load()["shard-00000.safetensors"].keys
    stored = [
        StoredSample(key, SamplePlace("shard-00000.safetensors", number), 0, 0, 0)
        for number, key in enumerate(keys)
    ]
    pack = PackReader(source, stored, 3, labels).pack([2, 0])
    assert pack.argmax is not None
    assert pack.share is not None
    expected = [labels.sample(stored[number].place, stored[number].key) for number in (2, 0)]
    assert pack.argmax.tolist() == [*expected[0].argmax.tolist(), *expected[1].argmax.tolist()]
    assert len(pack.share) == len(pack.plan.labels) == len(pack.argmax)


def test_labels_of_another_mask_are_refused(tiny_target: TargetInfo) -> None:
    sample = random_sample(tiny_target, [0, 0, 1, 1], "one")
    maker = LabelMaker(FinalHead(tiny_target), make_vocabulary(64, tiny_target.vocab_size))
    labels = maker.labels([label_states(sample)[:1]])
    with pytest.raises(TrainingError, match="sample one has 1 labels; expected 2"):
        build_pack([sample], 2, labels)
