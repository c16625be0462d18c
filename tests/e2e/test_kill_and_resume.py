"""The whole flow on a tiny random target, killed on the way: of extract and of train, step and flow.

The tests of this file follow one another in one workspace: each starts the same command again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from eagle3_core.config import PROJECT_ROOT, STAGES, load_profile
from eagle3_core.errors import EXIT_OK, EXIT_STEP_FAILED
from eagle3_core.host.run_folder import find_run, list_runs
from eagle3_core.lineage import trace
from eagle3_core.planning import plan_run
from eagle3_core.store.local import LocalStore
from tests.e2e.tiny_run import tiny_profile
from tests.host.test_process import living_steps, wait_for

pytestmark = [pytest.mark.orchestrator, pytest.mark.slow]

SECONDS = 500.0
PACED = Path(__file__).parent / "paced"


class Scene:
    """One profile, and what is known of its runs from outside."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.profile = tiny_profile(
            folder,
            target,
            "killed",
            capture={"shard_bytes": 65536, "max_batched_tokens": 64},
            engine={"max_num_seqs": 2},
            train={"num_epochs": 4, "checkpoint_every_seconds": 0.01},
        )
        self.config = load_profile(self.profile)
        self.shards: dict[str, int] = {}
        self.others = {ref for ref in LocalStore(self.config.store_path).refs() if ref.kind == "capture"}

    def start(self, paced: str = "") -> subprocess.Popen[str]:
        """Start the command; a step that is going to be killed is paced."""
        path = os.pathsep.join(filter(None, [str(PACED), os.environ.get("PYTHONPATH")]))
        variables = {"EAGLE3_TEST_PACED": paced, "PYTHONPATH": path} if paced else {}
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", str(self.profile)],
            cwd=PROJECT_ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> str:
        """Run the command to its end, which must be a good one; returns what it printed."""
        process = self.start()
        output, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, errors) == (EXIT_OK, ""), output + errors
        return output

    def capture_shards(self) -> dict[str, int]:
        """Finished shards by path, with the time of their last change: those that the manifest names."""
        store = LocalStore(self.config.store_path)
        captures = [
            found for found in store.list() if found.ref.kind == "capture" and found.ref not in self.others
        ]
        paths = [store.folder(found.ref) / entry.path for found in captures for entry in found.files]
        return {str(path): path.stat().st_mtime_ns for path in paths if path.exists()}

    def wait_in(self, stage: str, process: subprocess.Popen[str], condition) -> psutil.Process:
        """Wait for a moment inside a stage; returns the step's process."""
        steps: list[psutil.Process] = []

        def is_inside() -> bool:
            steps[:] = [p for p in living_steps(process.pid) if stage in _arguments(p)]
            return bool(steps and condition())

        assert wait_for(is_inside, SECONDS), f"{stage} was not seen"
        return steps[0]

    def latest(self):
        return find_run(self.config.workspace_path, "latest").record()


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def scene(tiny_folder, tiny_target, api):
    return Scene(tiny_folder, tiny_target)


def test_a_step_killed_in_extract_fails_the_run_and_keeps_its_shards(scene):
    process = scene.start(paced="extract")
    step = scene.wait_in("extract", process, lambda: len(scene.capture_shards()) >= 2)
    step.kill()
    _, errors = process.communicate(timeout=SECONDS)
    scene.shards = scene.capture_shards()
    assert process.returncode == EXIT_STEP_FAILED
    assert errors.startswith("eagle3: stage extract failed: step extract was killed by SIGKILL")
    assert errors.count("\n") == 1
    assert [stage.state for stage in scene.latest().stages][3:5] == ["failed", "pending"]
    assert len(scene.shards) >= 2


def test_a_flow_killed_in_extract_leaves_no_process_and_its_shards(scene):
    process = scene.start(paced="extract")
    count = len(scene.shards) + 2
    scene.wait_in("extract", process, lambda: len(scene.capture_shards()) >= count)
    process.kill()
    process.wait()
    assert wait_for(lambda: not living_steps(process.pid))
    now = scene.capture_shards()
    assert {path: now[path] for path in scene.shards} == scene.shards
    scene.shards = now
    assert scene.latest().state == "crashed"


def test_a_step_killed_in_train_fails_the_run(scene):
    process = scene.start(paced="train")
    step = scene.wait_in(
        "train", process, lambda: list(scene.config.store_path.glob("checkpoint/*/resume.json"))
    )
    step.kill()
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == EXIT_STEP_FAILED
    assert "stage train failed: step train was killed by SIGKILL" in errors
    now = scene.capture_shards()
    assert {path: now[path] for path in scene.shards} == scene.shards, "finished shards were made again"
    assert len(now) > len(scene.shards)
    scene.shards = now


def test_a_flow_killed_in_train_leaves_no_process(scene):
    (pointer,) = scene.config.store_path.glob("checkpoint/*/resume.json")
    before = pointer.stat().st_mtime_ns
    process = scene.start(paced="train")
    scene.wait_in("train", process, lambda: pointer.stat().st_mtime_ns != before)
    process.kill()
    process.wait()
    assert wait_for(lambda: not living_steps(process.pid))


def test_the_same_command_then_completes(scene):
    scene.finish()
    record = scene.latest()
    assert record.state == "completed"
    assert {stage.stage: stage.reused for stage in record.stages if stage.artifacts} == {
        "prepare": True,
        "extract": True,
        "verify": True,
        "train": False,
        "export": False,
        "benchmark": False,
    }
    assert scene.capture_shards() == scene.shards
    plan = plan_run(scene.config)
    trained = plan.manifest("checkpoint")
    assert trained.facts["result"]["resumed_from_step"] > 0
    assert not list(plan.store.folder(trained.ref).glob("resume*"))


def test_the_summary_of_the_run_has_its_figures(scene):
    run = find_run(scene.config.workspace_path, "latest")
    summary = json.loads((run.path / "summary.json").read_text())
    assert [stage["stage"] for stage in summary["stages"]] == list(STAGES)
    assert summary["capture"]["num_shards"] == len(scene.shards)
    assert len(summary["training"]["epochs"]) == scene.config.train.num_epochs
    assert summary["benchmark"]["acceptance_length"] >= 1.0
    assert summary["benchmark"]["num_speculative_tokens"] == 3
    assert summary["benchmark"]["lossless"] in ("identical", "ties")
    assert (run.path / "report.html").stat().st_size > 10000


def test_the_lineage_of_the_benchmark_ends_at_the_prompts_and_the_target(scene, eagle3_command):
    plan = plan_run(scene.config)
    lineage = trace(LocalStore(scene.config.store_path), plan.artifacts["benchmark"].ref)
    capture = lineage.node(str(plan.artifacts["capture"].ref))
    assert capture.identity["aux_layer_ids"] == [2, 4, 5]
    assert {node.name for node in lineage.nodes if node.state == "outside"} == {
        *scene.config.data.prompts, scene.config.target.model
    }  # fmt: skip
    done = eagle3_command("lineage", lineage.artifact, "--workspace", str(scene.config.workspace_path))
    assert done.returncode == EXIT_OK
    assert f"capture {capture.id}" in done.stdout


def test_a_second_run_reuses_everything_and_starts_no_step(scene):
    scene.finish()
    record = scene.latest()
    assert all(stage.reused for stage in record.stages if stage.artifacts)
    assert sum(stage.seconds for stage in record.stages) < 120
    logs = list((list_runs(scene.config.workspace_path)[-1].path / "logs").glob("*.log"))
    assert logs == []


def test_the_capture_is_verified_by_command_with_the_configuration_of_its_run(scene, eagle3_command):
    capture = plan_run(scene.config).artifacts["capture"].ref
    workspace = str(scene.config.workspace_path)
    done = eagle3_command("verify", str(capture), "--deep", "--json", "--workspace", workspace)
    assert done.returncode == EXIT_OK, done.stderr
    check = json.loads(done.stdout)
    assert (check["meaning"], check["problems"], check["num_files"]) == ("right", [], len(scene.shards))
    assert check["findings"]["agreement"] > 0.98


def test_one_removed_shard_alone_is_made_again(scene, eagle3_command):
    victim = Path(sorted(scene.shards)[1])
    content = victim.read_bytes()
    victim.unlink()
    done = eagle3_command("run", str(scene.profile), "--stages", "extract,verify,train")
    assert done.returncode == EXIT_OK, done.stderr
    now = scene.capture_shards()
    assert [path for path in now if now[path] != scene.shards[path]] == [str(victim)]
    assert victim.read_bytes() == content
    assert [stage.reused for stage in scene.latest().stages] == [False, True, True]
