"""Capture, verification and training in a bucket: the same draft as from a local store, on a small disk."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.capture import extract, verify
from eagle3_core.contracts import StepSpec, TrainResult
from eagle3_core.data.vocabulary import save_vocabulary
from eagle3_core.errors import FolderInUseError, StoreError, VerificationError
from eagle3_core.identity import draft_vocab_size, plan_checkpoint, plan_labels, plan_vocabulary
from eagle3_core.step import Progress
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.store.sample_cache import SampleCache
from eagle3_core.store.tree import files_below
from eagle3_core.target.info import inspect_target
from eagle3_core.training import train
from tests.capture.runs import capture_spec, make_samples, verify_spec
from tests.doubles.s3 import BUCKET, S3, running_s3
from tests.tiny import make_tiny_target
from tests.training.examples import make_vocabulary

pytestmark = pytest.mark.engine

LENGTHS = [40 + 7 * (number % 6) for number in range(40)]
SHARD_BYTES = 128 << 10
CHECKPOINT_SECONDS = 0.2
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Stages:
    """The specs of a run in one store."""

    extract: StepSpec
    verify: StepSpec
    train: StepSpec

    @property
    def store(self) -> LocalStore:
        return open_store(self.extract.config)

    @property
    def workspace(self) -> Path:
        return self.extract.config.workspace_path

    def checkpoint(self) -> tuple[str, list[float]]:
        """Hash of the trained weights, and the loss of every epoch."""
        manifest = self.store.read(self.train.outputs["checkpoint"].ref)
        weights = manifest.file(train.WEIGHTS_FILE)
        assert weights is not None
        result = TrainResult.model_validate(manifest.facts["result"])
        return weights.xxh3_128, [epoch.train_loss for epoch in result.epochs]


class Told(Progress):
    """A progress that calls back at every step, not for labels, and passes nothing on."""

    def __init__(self, then: Callable[[int], None] = lambda done: None) -> None:
        super().__init__("test")
        self._then = then

    def __call__(self, done: float, total: float | None, unit: str, message: str = "", **more: Any) -> None:
        if unit != "shards" or message != "labels":
            self._then(int(done))


def make_stages(workspace: Path, target: Path, store: str, **object_store: Any) -> Stages:
    """The specs of a run; dataset and vocabulary are put into its store where they are not there."""
    extracted = capture_spec(
        workspace, target, make_samples(LENGTHS),
        store=store,
        object_store=object_store,
        data={"generation": {"temperature": 1.0}},
        draft={"vocab_size": 64},
        capture={"engine": "reference", "shard_bytes": SHARD_BYTES, "max_batched_tokens": 256},
        train={"num_epochs": 2, "pack_tokens": 128, "compute_dtype": "float32", "learning_rate": 1e-3,
               "checkpoint_every_seconds": CHECKPOINT_SECONDS, "keep_best": 2},
        benchmark={"num_prompts": 2, "max_tokens": 12},
        verify={"reference_samples": 1},
    )  # fmt: skip
    config, info = extracted.config, inspect_target(target)
    dataset, capture = extracted.inputs["dataset"], extracted.outputs["capture"].ref
    vocabulary: ArtifactPlan = plan_vocabulary(config, info, dataset)
    with open_store(config).writer(vocabulary) as writer:
        if not writer.is_complete:
            mapping = make_vocabulary(draft_vocab_size(config, info), info.vocab_size)
            writer.complete([save_vocabulary(mapping, writer.folder)])
    trained = extracted.model_copy(
        update={
            "outputs": {
                "labels": plan_labels(capture, vocabulary.ref),
                "checkpoint": plan_checkpoint(config, info, capture, vocabulary.ref),
            },
            "inputs": {"capture": capture, "vocabulary": vocabulary.ref, "dataset": dataset},
        }
    )
    return Stages(extracted, verify_spec(extracted), trained)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are so small that a second thread only waits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(
        tmp_path_factory.mktemp("target"), hidden_size=64, intermediate_size=96, num_heads=2
    )


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running_s3() as server:
        server.reset()
        yield server


def in_bucket(s3: S3, workspace: Path, target: Path, prefix: str, **settings: Any) -> Stages:
    settings = {"endpoint_url": s3.url, "region": "us-east-1", "attempts": 2} | settings
    return make_stages(workspace, target, f"s3://{BUCKET}/{prefix}", **settings)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Stages:
    """The same run in a local store, trained to the end."""
    root = tmp_path_factory.mktemp("local")
    stages = make_stages(root, target, str(root / "store"))
    extract.run(stages.extract, Told())
    train.run(stages.train, Told())
    return stages


@pytest.fixture(scope="module")
def captured(s3: S3, tmp_path_factory: pytest.TempPathFactory, target: Path) -> Stages:
    """A run whose capture is in the bucket."""
    stages = in_bucket(s3, tmp_path_factory.mktemp("captured"), target, "captured")
    extract.run(stages.extract, Told())
    return stages


@dataclass
class Most:
    """The most bytes that were seen at once."""

    shards: int = 0
    cache: int = 0


@contextlib.contextmanager
def watched(workspace: Path, cache: SampleCache) -> Iterator[Most]:
    """Watch the bytes of shards below a workspace, finished or not, and of the cache."""
    most, stop = Most(), threading.Event()

    def look() -> None:
        most.shards = max(most.shards, shard_bytes(workspace))
        most.cache = max(most.cache, cache.bytes_taken())

    def look_again_and_again() -> None:
        while not stop.wait(0.02):
            look()

    thread = threading.Thread(target=look_again_and_again)
    thread.start()
    try:
        yield most
        look()
    finally:
        stop.set()
        thread.join()


def shard_bytes(folder: Path) -> int:
    total = 0
    for path in files_below(folder):
        if "shard-" in path.name and ".safetensors" in path.name:
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def test_a_bucket_with_a_small_cache_gives_the_draft_of_a_local_store(
    s3: S3, tmp_path: Path, target: Path, local: Stages
) -> None:
    whole = local.store.read(local.extract.outputs["capture"].ref).bytes
    limit = whole // 11
    stages = in_bucket(
        s3,
        tmp_path,
        target,
        "small",
        cache_bytes=limit,
        upload_backlog_bytes=3 * SHARD_BYTES,
        read_ahead_bytes=1,
    )
    cache = SampleCache(tmp_path / "cache" / "samples", limit)
    with watched(tmp_path, cache) as most:
        extract.run(stages.extract, Told())
        result = verify.run(stages.verify, Told())
        train.run(stages.train, Told())
    assert not result.bad_samples
    assert stages.checkpoint() == local.checkpoint()
    assert 0 < most.cache <= limit < whole / 10
    assert most.shards < 0.7 * whole
    assert shard_bytes(tmp_path) == 0
    manifest = stages.store.read(stages.extract.outputs["capture"].ref)
    assert not stages.store.problems(manifest)
    assert manifest.content == local.store.read(manifest.ref).content


def once_saved(is_saved: Callable[[], bool], then: Callable[[], object]) -> Callable[[int], None]:
    """What training is told to do: `then`, at the third step, when the checkpoint of the second is there."""

    def at(step: int) -> None:
        if step == 2:
            time.sleep(CHECKPOINT_SECONDS)  # so that one is due
        if step == 3:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not is_saved():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            then()

    return at


def test_training_goes_on_from_the_bucket_on_another_host(
    s3: S3, tmp_path: Path, target: Path, captured: Stages, local: Stages
) -> None:
    first, second = (in_bucket(s3, tmp_path / name, target, "captured") for name in ("first", "second"))
    checkpoint = str(first.train.outputs["checkpoint"].ref)

    def is_uploaded() -> bool:
        return any(key.endswith(".progress.json") for key in s3.keys(f"captured/{checkpoint}"))

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.run(first.train, Told(once_saved(is_uploaded, die)))
    result = train.run(second.train, Told())
    assert result.resumed_from_step is not None
    assert second.checkpoint() == local.checkpoint()
    left = s3.keys(f"captured/{checkpoint}")
    assert sorted(key.rpartition("/")[2] for key in left if ".lease" not in key) == [
        result.kept[1].file, "config.json", "manifest.json", "metrics.jsonl", "model.safetensors",
    ]  # fmt: skip


def test_a_lost_shard_is_named_in_one_line_made_again_and_training_goes_on(
    s3: S3, tmp_path: Path, target: Path, captured: Stages, local: Stages
) -> None:
    capture = captured.extract.outputs["capture"].ref
    for key in s3.keys(f"captured/{capture}"):
        source = {"Bucket": BUCKET, "Key": key}
        s3.client().copy_object(Bucket=BUCKET, Key=key.replace("captured", "lossy", 1), CopySource=source)
    stages = in_bucket(s3, tmp_path, target, "lossy", cache_bytes=0, read_ahead_bytes=1)
    lost = f"lossy/{capture}/shard-00003.safetensors"
    content = s3.keys()[lost]

    def is_saved() -> bool:
        return any(path.name == "resume.json" for path in files_below(tmp_path))

    def lose() -> None:
        s3.client().delete_object(Bucket=BUCKET, Key=lost)

    pattern = rf"s3://{BUCKET}/{lost}"
    with pytest.raises(StoreError, match=pattern) as trained:
        train.run(stages.train, Told(once_saved(is_saved, lose)))
    assert "shard-00003" in str(trained.value)
    assert "extract" in str(trained.value)
    assert len(str(trained.value).splitlines()) == 1
    with pytest.raises(VerificationError, match=pattern):
        verify.run(stages.verify, Told())
    manifest = stages.store.read(capture)
    assert list(stages.store.problems(manifest)) == ["shard-00003.safetensors"]

    assert extract.run(stages.extract, Told()).num_new_shards == 1
    assert s3.keys()[lost] == content
    verify.run(stages.verify, Told())
    result = train.run(stages.train, Told())
    assert result.resumed_from_step is not None
    assert stages.checkpoint() == local.checkpoint()


def test_a_second_host_that_captures_into_the_bucket_is_refused_and_told_who_does(
    s3: S3, tmp_path: Path, target: Path
) -> None:
    first, second = (in_bucket(s3, tmp_path / name, target, "held") for name in ("first", "second"))
    plan = first.extract.outputs["capture"]
    with (
        first.store.writer(plan, "the-first-run"),
        pytest.raises(FolderInUseError, match=rf"s3://{BUCKET}/held/{plan.ref} is in use.*the-first-run"),
    ):
        extract.run(second.extract, Told())
