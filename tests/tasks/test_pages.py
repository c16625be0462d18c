"""What Prefect's artifacts say of outcomes and manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.estimate.run import estimate_run
from eagle3_core.lineage import trace
from eagle3_core.planning import plan_run
from eagle3_core.stage_run import StageOutcome
from eagle3_core.store.local import LocalStore
from tests.doubles.profile import stand_in_config
from tests.store.artifacts import add_run

pytestmark = pytest.mark.orchestrator


def test_the_page_of_a_manifest_says_what_made_the_artifact_and_what_it_holds(tmp_path: Path) -> None:
    from tasks.pages import manifest_key, manifest_markdown

    store = LocalStore(tmp_path)
    run = add_run(store, "a", age_days=1)
    manifest = store.read(run.checkpoint)
    page = manifest_markdown(manifest, trace(store, run.checkpoint))
    assert manifest_key(manifest) == "eagle3-manifest-checkpoint"
    assert f"## {run.checkpoint}\n" in page
    assert f"capture `{run.capture}`, vocabulary `{run.vocabulary}`" in page
    assert f"`{manifest.files[0].path}` | 10 bytes, `{manifest.files[0].xxh3_128}`" in page
    assert f"| hash over all files | `{manifest.content}` |" in page
    assert f"`{run.conversations}` → `{run.dataset}`" in page
    assert "| name | a |" in page
    assert "made_from" not in page


def test_a_verification_is_a_table_of_what_is_wrong_and_what_was_measured() -> None:
    from tasks.pages import stage_tables

    result = {
        "agreement": 0.9912,
        "num_rows_checked": 1200,
        "num_ties": 3,
        "layers": [{"capture_id": 2, "nearest_id": 2, "median_error": 0.001, "nearest_wrong_median": 0.4}],
        "bad_samples": [{"key": "k7", "shard": "shard-00003", "problem": "capture id 4 has 1 NaN and 0 Inf"}],
        "condemned": [{"shard": "shard-00001", "reason": "3 rows of states for 4 tokens"}],
    }
    (page,) = stage_tables(StageOutcome(stage="verify", message="made: verification/1", result=result))
    assert page.key == "eagle3-verify-table"
    assert [row["what"] for row in page.rows] == ["condemned shard", "bad sample", "layer", "next tokens"]
    assert page.rows[1] == {
        "what": "bad sample", "shard": "shard-00003", "sample or layer": "k7",
        "finding": "capture id 4 has 1 NaN and 0 Inf",
    }  # fmt: skip
    assert page.rows[3]["finding"] == "0.9912 of 1,200 rows, 3 of them ties"
    assert len({tuple(row) for row in page.rows}) == 1


def test_a_training_is_a_table_of_its_looks_at_the_held_out_split() -> None:
    from tasks.pages import outcome_markdown, stage_tables

    looks = [
        {
            "step": step,
            "epoch": epoch,
            "train_loss": 2.0,
            "heldout_loss": 2.1,
            "heldout": {"acceptance_length": a},
        }
        for step, epoch, a in ((500, 0, 1.9), (1000, 0, 2.1), (1500, 1, 2.0))
    ]
    kept = [{"step": 1000, "file": "model.safetensors"}, {"step": 1500, "file": "best-00001500.safetensors"}]
    result = {"evaluations": looks, "kept": kept, "best_epoch": 0}
    outcome = StageOutcome(stage="train", message="made: checkpoint/1", result=result)
    (page,) = stage_tables(outcome)
    assert page.key == "eagle3-train-table"
    assert [(row["step"], row["epoch"], row["kept as"]) for row in page.rows] == [
        ("500", 1, ""),
        ("1,000", 1, "model.safetensors"),
        ("1,500", 2, "best-00001500.safetensors"),
    ]
    assert page.rows[1]["held-out acceptance length"] == "2.1000"
    assert "| best_epoch | 1 |" in outcome_markdown(outcome, "Trained"), "counted as in the table"


def test_quarantine_and_collected_garbage_are_tables_and_nothing_is_no_table() -> None:
    from tasks.pages import stage_tables

    quarantine = {"quarantined": [{"key": "k", "reason": "kills the engine"}]}
    (page,) = stage_tables(StageOutcome(stage="extract", result=quarantine))
    assert page.rows == [{"what": "quarantined sample", "key": "k", "reason": "kills the engine"}]
    line = {
        "artifact": "capture/1", "bytes": 5, "created_at": "t", "action": "kept", "reasons": ["a", "b"],
        "named": True,
    }  # fmt: skip
    (page,) = stage_tables(StageOutcome(stage="cleanup", details={"retention": {"lines": [line]}}))
    assert page.rows[0]["why"] == "a; b"
    assert stage_tables(StageOutcome(stage="extract", result={})) == []
    assert stage_tables(StageOutcome(stage="train", result={"num_steps": 3})) == []


def test_the_page_of_a_stage_lists_each_check_and_each_layer_with_its_figures() -> None:
    from tasks.pages import MAX_ENTRIES, outcome_markdown

    checks = [
        {"name": name, "ok": True, "found": found} for name, found in (("disk", "5 GiB"), ("gpu", "no"))
    ]
    layer = {"capture_id": 2, "nearest_id": 2, "median_error": 0.001, "p99_error": None, "rows": [1, 2]}
    result = {"layers": [layer], "epochs": [{"epoch": 0, "heldout": {"x": 1}}], "nothing": []}
    many = [{"key": str(index)} for index in range(MAX_ENTRIES + 7)]
    details = {"checks": checks, "probe": {"many": many}}
    page = outcome_markdown(StageOutcome(stage="preflight", result=result, details=details), "Preflight")
    assert "| checks | 2, listed below |" in page
    assert (
        "\n### checks\n\n| name | ok | found |\n| --- | --- | --- |\n| disk | True | 5 GiB |\n"
        "| gpu | True | no |\n"
    ) in page
    assert "| capture_id | nearest_id | median_error |\n| --- | --- | --- |\n| 2 | 2 | 0.001 |\n" in page
    assert "### epochs\n\n| epoch |\n| --- |\n| 1 |\n" in page
    assert page.endswith(f"| {MAX_ENTRIES - 1} |\n\nand 7 more\n")
    assert "### probe.many\n" in page


def test_a_long_table_is_cut_and_says_so() -> None:
    from tasks.pages import MAX_ROWS, stage_tables

    many = [{"key": f"k{index}", "reason": "r"} for index in range(MAX_ROWS + 7)]
    (page,) = stage_tables(StageOutcome(stage="extract", result={"quarantined": many}))
    assert len(page.rows) == MAX_ROWS + 1
    assert page.rows[-1] == {"what": "and 7 more", "key": "", "reason": ""}


def test_a_plan_is_a_table_of_what_takes_space_on_which_disk(tmp_path: Path) -> None:
    from tasks.pages import stage_tables

    estimate = estimate_run(plan_run(stand_in_config(tmp_path)))
    (table,) = stage_tables(StageOutcome(stage="plan", details=estimate.model_dump(mode="json")))
    assert table.key == "eagle3-plan-table"
    first, *others = table.rows
    assert first["at most"] == f"{estimate.file_systems[0].need_bytes:,}"
    assert first["free bytes"] == f"{estimate.file_systems[0].free_bytes:,}"
    assert {"capture", "checkpoint", "logs and report"} <= {row["what"] for row in others}
