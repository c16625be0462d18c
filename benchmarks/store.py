"""Compares the store with the plain way of doing the same, round by round: `python -m benchmarks.store`.

    write    shards, hashed while they are written, against `safetensors.torch.save_file` of the same tensors;
             both into a temporary name, synced, renamed, the folder synced
    verify   `LocalStore.problems`, which hashes every file, against reading the same files with as many
             threads and throwing the bytes away
    cached   samples of a capture in S3 through the local cache that holds them, against the same samples of a
             local capture; both proven by their hashes, read ahead by as many threads
    bytes    of a token, for both policies of final states, against four states of every token

The two sides of a comparison take turns, and who begins changes from round to round. Before each turn of
`verify` and `cached` the kernel is told to forget the files, so the disk is read. The S3 server is moto's, in
a process of its own, and only fills the cache. A ratio above 1 says that the store is the faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.s3_server import empty_s3_server
from eagle3_core.artifacts import ArtifactPlan, Manifest
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import READ_BYTES, sync_folder
from eagle3_core.store.local import HASHING_THREADS, LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.store.samples import SamplePlace, SampleSource, open_samples
from eagle3_core.store.shard_writer import write_packed_shard, write_shard
from eagle3_core.store.shards import CapturedSample, PackedShard, ShardLayout

AUX_IDS = (2, 16, 29)
PLAN = ArtifactPlan(kind="capture", identity={"benchmark": "store"})
BUCKET = "eagle3-benchmark"
POLICIES = ("loss_rows", "all")
LINES = {
    "write": ("plain safetensors", "hashed shards"),
    "verify": ("raw reads", "verify"),
    "cached": ("local capture", "S3 through the cache"),
}
"""Of each comparison the plain side and the store's."""


def make_layout(hidden_size: int, policy: Any) -> ShardLayout:
    """bf16 states of three auxiliary layers and the final one."""
    return ShardLayout(AUX_IDS, 32, hidden_size, "bfloat16", policy)


def make_samples(count: int, num_tokens: int, layout: ShardLayout, seed: int) -> list[CapturedSample]:
    """Samples of equal length with random states; the second half of each carries loss."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(num_tokens) >= num_tokens // 2).to(torch.uint8)
    loss_rows = 1 + mask[1:].nonzero().squeeze(-1)
    rows = loss_rows if layout.final_state == "loss_rows" else torch.arange(num_tokens)

    def states(*shape: int) -> torch.Tensor:
        bits = torch.randint(
            -(2**13), 2**13, (*shape, layout.hidden_size), generator=generator, dtype=torch.int16
        )
        return bits.view(torch.bfloat16)

    return [
        CapturedSample(
            key=f"sample-{seed}-{index:05d}",
            input_ids=torch.randint(0, 32_000, (num_tokens,), generator=generator, dtype=torch.int32),
            loss_mask=mask,
            aux_states=states(num_tokens, len(AUX_IDS)),
            final_states=states(len(rows)),
            final_rows=rows,
        )
        for index in range(count)
    ]


def take_turns(
    rounds: int, plain: Callable[[], object], store: Callable[[], object], prepare: Callable[[], object]
) -> dict[str, Any]:
    """Time both sides in every round, the order reversed in every other one.

    Args:
        rounds: measured ones; a first one warms up.
        plain, store: what is timed.
        prepare: called before each turn, not timed.
    """
    seconds: dict[str, list[float]] = {"plain": [], "store": []}
    sides = {"plain": plain, "store": store}
    for number in range(rounds + 1):
        for name in sides if number % 2 else reversed(sides):
            prepare()
            started = time.perf_counter()
            sides[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return summary(seconds["plain"], seconds["store"])


def summary(plain: Sequence[float], store: Sequence[float]) -> dict[str, Any]:
    """Medians, and the ratio of each round: speed of the store over that of the plain side."""
    ratios = [p / s for p, s in zip(plain, store, strict=True)]
    return {
        "plain_seconds": statistics.median(plain),
        "store_seconds": statistics.median(store),
        "ratio": statistics.median(ratios),
        "round_ratios": ratios,
    }


def forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache; they must be on the disk already."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def plain_write(path: Path, packed: PackedShard) -> None:
    """What a careful writer without hashes does."""
    temporary = path.with_suffix(".tmp")
    save_file(packed.tensors(), temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def raw_read(paths: Sequence[Path]) -> None:
    """Read files side by side, as verification does."""

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        list(pool.map(read, paths))


def measure_write(folder: Path, packed: PackedShard, rounds: int) -> dict[str, Any]:
    """Write one shard both ways."""
    folder.mkdir(parents=True)
    path = folder / "shard.safetensors"
    return take_turns(
        rounds,
        lambda: plain_write(path, packed),
        lambda: write_packed_shard(path, packed),
        lambda: path.unlink(missing_ok=True),
    )


def measure_verify(store: LocalStore, manifest: Manifest, rounds: int) -> dict[str, Any]:
    """Hash a capture's files, and just read them."""
    paths = [store.folder(manifest.ref) / entry.path for entry in manifest.files]

    def verify() -> None:
        problems = store.problems(manifest)
        assert not problems, problems

    return take_turns(rounds, lambda: raw_read(paths), verify, lambda: forget(paths))


def measure_cached(config: RunConfig, local: LocalStore, manifest: Manifest, rounds: int) -> dict[str, Any]:
    """Read all samples in another order each round, from the capture's files and from the cache."""
    stored = open_store(config)
    shards = local.folder(manifest.ref)
    with stored.writer(PLAN) as writer:
        for entry in manifest.files:
            shutil.copyfile(shards / entry.path, writer.folder / entry.path)
            writer.record(entry)
        writer.complete()
    remote = open_samples(config, stored, stored.read(PLAN.ref))
    plain = SampleSource(
        local, manifest, None, config.object_store.max_connections, int(config.object_store.read_ahead_bytes)
    )
    places = [SamplePlace(name, i) for name, shard in remote.load().items() for i in range(len(shard))]
    started = time.perf_counter()
    read_all(remote, places)
    first_seconds = time.perf_counter() - started
    order = random.Random(0)

    def prepare() -> None:
        order.shuffle(places)
        cache = config.workspace_path / "cache" / "samples"
        forget([*shards.glob("*.safetensors"), *(path for path in cache.iterdir() if path.is_file())])

    found = take_turns(
        rounds, lambda: read_all(plain, list(places)), lambda: read_all(remote, list(places)), prepare
    )
    assert remote.counts.from_cache >= rounds * manifest.facts["state_bytes"], "the cache did not hold all"
    return found | {"uncached_seconds": first_seconds}


def read_all(source: SampleSource, places: Sequence[SamplePlace]) -> None:
    """Read samples ahead and throw them away."""
    with source.ahead(places) as samples:
        for _ in samples:
            pass


def count_bytes(folder: Path, hidden_size: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Bytes a token of a real shard, by policy: of its states, of the whole file, and of four full states."""
    folder.mkdir(parents=True)
    found = {}
    for policy in POLICIES:
        layout = make_layout(hidden_size, policy)
        samples = make_samples(8, num_tokens, layout, 0)
        entry = write_shard(folder / f"{policy}.safetensors", samples, layout)
        tokens = entry.facts["num_tokens"]
        found[policy] = {
            "states": entry.facts["state_bytes"] / tokens,
            "file": entry.bytes / tokens,
            "four_states": 4.0 * hidden_size * 2,
        }
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All comparisons, in `folder`."""
    layout = make_layout(options.hidden_size, "loss_rows")
    rows = len(AUX_IDS) * options.tokens + options.tokens - options.tokens // 2
    per_shard = max(1, options.shard_bytes // (2 * options.hidden_size * rows))
    result: dict[str, Any] = {
        "bytes_per_token": count_bytes(folder / "bytes", options.hidden_size, options.tokens)
    }
    local = LocalStore(folder / "local")
    state_bytes = 0
    with local.writer(PLAN) as writer:
        for number in range(options.num_shards):
            samples = make_samples(per_shard, options.tokens, layout, number)
            entry = write_shard(writer.folder / f"shard-{number:05d}.safetensors", samples, layout)
            state_bytes += entry.facts["state_bytes"]
            writer.record(entry)
        manifest = writer.complete(state_bytes=state_bytes)
    result["capture_bytes"], result["shard_bytes"] = manifest.bytes, manifest.files[0].bytes
    result["verify"] = measure_verify(local, manifest, options.rounds)
    result["write"] = measure_write(folder / "write", pack(samples, layout), options.rounds)
    config = make_config(folder, start_s3(), 2 * manifest.bytes)
    result["cached"] = measure_cached(config, local, manifest, options.rounds)
    return result


def pack(samples: Sequence[CapturedSample], layout: ShardLayout) -> PackedShard:
    """A shard in memory, filled as a capture fills it."""
    plain = [Sample(s.key, "", "train", s.input_ids.numpy(), s.loss_mask.numpy(), 0, "stop") for s in samples]
    packed = PackedShard(plain, layout)
    for index, sample in enumerate(samples):
        packed.sample(index).aux_states.copy_(sample.aux_states)
        packed.sample(index).final_states.copy_(sample.final_states)
    return packed


def start_s3() -> str:
    """moto's server with an empty bucket; gives its URL."""
    import boto3

    os.environ |= {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark"}
    url = empty_s3_server()
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    return url


def make_config(folder: Path, url: str, cache_bytes: int) -> RunConfig:
    """A run whose store is the server's bucket."""
    return parse_config(
        {
            "name": "store-benchmark",
            "target": {"model": "none"},
            "store": f"s3://{BUCKET}/store",
            "workspace": str(folder / "workspace"),
            "object_store": {"endpoint_url": url, "region": "us-east-1", "cache_bytes": cache_bytes},
        }
    )


def print_table(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Show the result."""
    print(
        f"{options.num_shards} shards of {result['shard_bytes'] / 2**20:,.0f} MiB, hidden size "
        f"{options.hidden_size:,}, samples of {options.tokens:,} tokens, {options.rounds} rounds"
    )
    for name, (plain, ours) in LINES.items():
        found = result[name]
        size = result["shard_bytes"] if name == "write" else result["capture_bytes"]
        speeds = [size / found[f"{side}_seconds"] / 2**20 for side in ("plain", "store")]
        by_round = ", ".join(f"{ratio:.2f}" for ratio in found["round_ratios"])
        print(
            f"{name:8s} {plain} {speeds[0]:,.0f} MiB/s, {ours} {speeds[1]:,.0f} MiB/s: ratio "
            f"{found['ratio']:.3f} (by round {by_round})"
        )
    uncached = result["capture_bytes"] / result["cached"]["uncached_seconds"] / 2**20
    print(f"         the first epoch, from the server on this machine: {uncached:,.0f} MiB/s")
    for policy, found in result["bytes_per_token"].items():
        print(
            f"bytes    {policy}: {found['states']:,.0f} a token of states, {found['file']:,.0f} of file, "
            f"against {found['four_states']:,.0f}: {found['file'] / found['four_states']:.3f}"
        )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512, help="of a sample; the second half carries loss")
    parser.add_argument("--shard-bytes", type=int, default=256 << 20)
    parser.add_argument("--num-shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each comparison")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a new folder below it is used")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="eagle3-store-", dir=options.folder))
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(options, result)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        options.json.write_text(json.dumps(settings | result, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
