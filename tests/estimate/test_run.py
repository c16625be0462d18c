"""Whether a run fits, on which file system, and what would make it fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.config import RunConfig
from eagle3_core.errors import DiskFullError
from eagle3_core.estimate import space
from eagle3_core.estimate.run import RunEstimate, check_space, estimate_run
from eagle3_core.estimate.space import SpaceItem, peak_bytes
from eagle3_core.host.inspect import GIB
from eagle3_core.host.run_folder import create_run_folder
from eagle3_core.pipeline import run_stage
from eagle3_core.planning import plan_run
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import LocalStore
from eagle3_core.store.reserve import Reservations
from eagle3_core.store.tree import folder_bytes
from tests.disks import small_disk
from tests.doubles.profile import stand_in_config

FIRST = ["conversations", "dataset", "vocabulary"]
MIB = 1 << 20

pytestmark = pytest.mark.orchestrator


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def prepare(config: RunConfig) -> None:
    create_run_folder(config, ["prepare"], "r")
    run_stage("prepare", config, "r")


def with_free(monkeypatch: pytest.MonkeyPatch, free: int, config: RunConfig, **more: Any) -> RunEstimate:
    """The estimate where every disk has so much free."""
    monkeypatch.setattr(space, "free_disk_bytes", lambda path: free)
    return estimate_run(plan_run(config), **more)


def test_what_is_there_is_not_to_be_written_again(tmp_path: Path) -> None:
    config = stand_in_config(tmp_path)
    before = estimate_run(plan_run(config))
    assert all(artifact.new_bytes > 0 for artifact in before.artifacts)
    prepare(config)
    after = estimate_run(plan_run(config))
    by_kind = {artifact.kind: artifact for artifact in after.artifacts}
    assert [by_kind[kind].new_bytes for kind in FIRST] == [0, 0, 0]
    assert after.minutes["prepare"] == 0
    assert after.workload.is_exact
    assert by_kind["capture"].ref is not None


def test_stages_that_do_not_run_write_nothing(tmp_path: Path) -> None:
    estimate = estimate_run(plan_run(stand_in_config(tmp_path)), ["prepare"])
    assert {artifact.kind for artifact in estimate.artifacts if artifact.new_bytes} == set(FIRST)
    assert list(estimate.minutes) == ["prepare"]


def test_the_benchmark_is_counted_with_no_more_prompts_than_are_held_out(tmp_path: Path) -> None:
    """Of the eight prompts one is held out, of the samples that the stand-in makes of them two."""
    many = stand_in_config(tmp_path, benchmark={"num_prompts": 5000})
    for num_heldout in (1, 2):
        few = stand_in_config(tmp_path, benchmark={"num_prompts": num_heldout})
        one, other = estimate_run(plan_run(few)), estimate_run(plan_run(many))
        assert other.workload.num_heldout == num_heldout
        assert other.minutes["benchmark"] == one.minutes["benchmark"]
        assert other.new_bytes == one.new_bytes
        prepare(few)


def item(stage: str, kept: int, peak: int) -> SpaceItem:
    return SpaceItem(what=stage, stage=stage, path="/", bytes=kept, peak_bytes=peak)


def test_the_most_at_once_counts_what_earlier_stages_left_and_what_one_stage_takes() -> None:
    """100 stay of the capture; training takes 90 more and leaves 10, export 5: at most 190 at once."""
    items = [item("extract", 100, 100), item("train", 10, 90), item("export", 5, 5)]
    assert peak_bytes(items) == 190
    assert peak_bytes([item("extract", 100, 100), item("train", 10, 12), item("export", 5, 5)]) == 115


def test_a_run_that_does_not_fit_is_refused_with_the_figures_and_the_smallest_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stand_in_config(tmp_path)
    need = estimate_run(plan_run(config)).file_systems[0].need_bytes
    estimate = with_free(monkeypatch, need - 1, config)
    assert not estimate.fits
    with pytest.raises(DiskFullError) as caught:
        check_space(estimate)
    line = str(caught.value)
    assert f"it needs {need:,} bytes there at once (the largest, each at its own peak: " in line
    assert f"{need - 1:,} are free and 0 must stay so; 1 are lacking" in line
    assert "the smallest change that makes it fit: " in line
    assert "\n" not in line
    assert with_free(monkeypatch, need, config).fits


def test_every_change_that_is_offered_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"final_state": "all", "shard_bytes": 4096}
    config = stand_in_config(tmp_path, capture=wide)
    need = estimate_run(plan_run(config)).file_systems[0].need_bytes
    changes = {one.change: one for one in with_free(monkeypatch, need - 2000, config).options}
    assert changes["capture.final_state=loss_rows"].lacking_bytes == 0
    limit = next(change for change in changes if change.startswith("`--limit "))
    count = int(limit.split("`")[1].split()[1])
    monkeypatch.setattr(space, "free_disk_bytes", lambda path: need - 2000)
    assert estimate_run(plan_run(config.model_copy(update={"limit": count}))).fits
    assert not estimate_run(plan_run(config.model_copy(update={"limit": count + 1}))).fits
    loss_rows = stand_in_config(tmp_path, capture=wide | {"final_state": "loss_rows"})
    assert estimate_run(plan_run(loss_rows)).file_systems[0].need_bytes == (
        changes["capture.final_state=loss_rows"].need_bytes
    )


def test_fewer_resumable_checkpoints_are_offered_and_a_smaller_reserve_where_that_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stand_in_config(tmp_path, train={"keep_last": 50})
    need = estimate_run(plan_run(config)).file_systems[0].need_bytes
    changes = {one.change: one for one in with_free(monkeypatch, need - 1, config).options}
    one_checkpoint = changes["train.keep_last=1"]
    assert one_checkpoint.lacking_bytes == 0
    fewer = stand_in_config(tmp_path, train={"keep_last": 1})
    assert estimate_run(plan_run(fewer)).file_systems[0].need_bytes == one_checkpoint.need_bytes
    assert not any(change.startswith("limits.") for change in changes)
    free = need + 3 * GIB // 2
    careful = stand_in_config(tmp_path, limits={"min_free_disk_gib": 2.0})
    options = with_free(monkeypatch, free, careful).options
    (change,) = [one.change for one in options if one.change.startswith("limits.")]
    assert careful.limits.min_free_disk_gib > float(change.partition("=")[2]) > 1.4
    bolder = stand_in_config(tmp_path, limits={"min_free_disk_gib": float(change.partition("=")[2])})
    assert with_free(monkeypatch, free, bolder).fits


def test_what_garbage_collection_would_free_is_the_smallest_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stand_in_config(tmp_path)
    store = LocalStore(config.store_path)
    old = ArtifactPlan(kind="capture", identity={"old": 1})
    with store.writer(old) as writer:
        write_atomic(writer.folder / "shard", "x" * 5000)
        writer.complete([writer.folder / "shard"])
    store.trash().put(old.ref, 5000)
    need = estimate_run(plan_run(config)).file_systems[0].need_bytes
    first = with_free(monkeypatch, need - 4000, config).options[0]
    assert first.change.startswith("`eagle3 gc --unreferenced` and `eagle3 gc --purge` free 5,")
    assert first.lacking_bytes == 0
    assert store.trash().entries()


def test_a_cache_of_samples_that_is_too_large_is_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stand_in_config(tmp_path)
    plan = plan_run(config)
    remote = config.model_copy(update={"store": "s3://bucket/prefix"})
    monkeypatch.setattr("eagle3_core.planning.open_store", lambda _: plan.store)
    whole = estimate_run(plan_run(remote)).file_systems[0]
    assert {"sample cache", "shards to verify"} <= {one.what for one in whole.items}
    assert any("on its way to s3://bucket/prefix" in one.what for one in whole.items)
    estimate = with_free(monkeypatch, whole.need_bytes - 1000, remote)
    option = next(one for one in estimate.options if one.change.startswith("object_store.cache_bytes="))
    assert option.lacking_bytes == 0
    size = int(option.change.rpartition("=")[2])
    smaller = remote.object_store.model_copy(update={"cache_bytes": size})
    assert estimate_run(plan_run(remote.model_copy(update={"object_store": smaller}))).fits


def test_space_that_another_run_has_reserved_is_not_free_and_the_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stand_in_config(tmp_path)
    system = estimate_run(plan_run(config)).file_systems[0]
    Reservations(None).reserve("20260101-000000-other-0000", {system.key: {"capture/x": 5000}})
    estimate = with_free(monkeypatch, system.need_bytes + 4999, config)
    with pytest.raises(DiskFullError, match=r"reserved by 20260101-000000-other-0000 5,000; 1 are lacking"):
        check_space(estimate)
    own = with_free(monkeypatch, system.need_bytes + 4999, config, run_id="20260101-000000-other-0000")
    assert own.fits


def test_store_and_workspace_on_two_disks_are_counted_apart(tmp_path: Path) -> None:
    with small_disk(tmp_path / "store", MIB) as disk:
        config = stand_in_config(tmp_path, store=str(disk.path / "store"))
        estimate = estimate_run(plan_run(config))
        by_mount = {one.mount: one for one in estimate.file_systems}
        kinds = {one.what.partition("/")[0] for one in by_mount[str(disk.path)].items}
        assert kinds >= {*FIRST, "capture", "checkpoint"}
        others = [one for mount, one in by_mount.items() if mount != str(disk.path)]
        assert [[one.what for one in other.items] for other in others] == [
            ["logs and report", "TensorBoard files"]
        ]
        assert json.loads(estimate.model_dump_json())["file_systems"][0]["need_bytes"] > 0


def test_a_run_keeps_its_reservation_up_to_date_while_it_writes(tmp_path: Path) -> None:
    config = stand_in_config(tmp_path)
    create_run_folder(config, ["plan", "prepare", "extract"], "r")
    run_stage("plan", config, "r")
    reservations = Reservations(None)
    first = reservations.find("r")
    assert first is not None
    run_stage("prepare", config, "r")
    run_stage("extract", config, "r")
    last = reservations.find("r")
    assert last is not None
    assert first.since == last.since
    (needs,) = last.needs.values()
    (before,) = first.needs.values()
    assert not {"conversations", "dataset", "vocabulary"} & needs.keys()
    assert sum(needs.values()) < sum(before.values())
    assert folder_bytes(config.store_path) > 0
