"""The whole step on the tiny target, with a real engine and a real store."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eagle3_core.config import RunConfig
from eagle3_core.contracts import PrepareResult, StepSpec
from eagle3_core.data import prepare
from eagle3_core.data.vocabulary import load_vocabulary
from eagle3_core.errors import DataError
from eagle3_core.identity import plan_conversations, plan_dataset, plan_vocabulary
from eagle3_core.step import Progress
from eagle3_core.store.dataset import content_hash, read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.target import vllm_engine
from eagle3_core.target.info import inspect_target
from tests.tiny import write_prompts

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.engine

END_ID = 2
NUM_PROMPTS = 16
BAD_ROWS = ({"messages": [{"role": "observation", "content": "x"}]}, {"messages": []})


class _Workspace:
    """A workspace with prompts, and how often the step loaded the engine in it."""

    def __init__(self, folder: Path, make_config: Callable[..., RunConfig]) -> None:
        self.folder, self._make_config = folder, make_config
        self.prompts = write_prompts(folder / "prompts.jsonl", NUM_PROMPTS)
        self.num_loads = 0

    def spec(self, **changes: Any) -> StepSpec:
        data = {"prompts": [str(self.prompts)], "heldout_fraction": 0.25, "generation": {"max_tokens": 24}}
        config = self._make_config(self.folder, data=data | changes.pop("data", {}), **changes)
        target = inspect_target(Path(config.target.model))
        conversations = plan_conversations(config, target, "vllm test")
        dataset = plan_dataset(config, target, conversations.ref)
        vocabulary = plan_vocabulary(config, target, dataset.ref)
        outputs = {"conversations": conversations, "dataset": dataset, "vocabulary": vocabulary}
        return StepSpec(config=config, run_id="r", target_path=config.target.model, outputs=outputs)

    def run(self, spec: StepSpec) -> PrepareResult:
        return prepare.run(spec, Progress("prepare"))

    def folder_of(self, spec: StepSpec, kind: str) -> Path:
        return LocalStore(spec.config.store_path).folder(spec.outputs[kind].ref)

    def add_rows(self, *rows: dict[str, Any]) -> None:
        with self.prompts.open("a") as handle:
            handle.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def finished(
    make_config: Callable[..., RunConfig], engine: LLM, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PrepareResult]:
    """The store and the result of one whole run, for tests to start from a copy."""
    made = _Workspace(tmp_path_factory.mktemp("finished"), make_config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vllm_engine, "load_vllm", lambda config, target_path: engine)
        spec = made.spec()
        return spec.config.store_path, made.run(spec)


@pytest.fixture
def workspace(
    tmp_path: Path, make_config: Callable[..., RunConfig], engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> _Workspace:
    """A workspace without artifacts."""
    made = _Workspace(tmp_path, make_config)

    def load(config: RunConfig, target_path: str) -> LLM:
        made.num_loads += 1
        return engine

    monkeypatch.setattr(vllm_engine, "load_vllm", load)
    return made


@pytest.fixture
def prepared(workspace: _Workspace, finished: tuple[Path, PrepareResult]) -> _Workspace:
    """A workspace in which the step has run once with the same prompts."""
    shutil.copytree(finished[0], workspace.spec().config.store_path)
    return workspace


def test_the_three_artifacts_agree_with_the_result(
    prepared: _Workspace, finished: tuple[Path, PrepareResult]
) -> None:
    workspace, result = prepared, finished[1]
    spec = workspace.spec()
    store = LocalStore(spec.config.store_path)
    samples = read_dataset(workspace.folder_of(spec, "dataset"))
    assert result.num_read == NUM_PROMPTS == result.num_kept + len(result.rejected)
    assert (result.num_kept, result.num_train + result.num_heldout) == (len(samples), len(samples))
    assert result.num_heldout == sum(sample.split == "heldout" for sample in samples) > 0
    assert result.num_tokens == sum(map(len, samples))
    assert result.num_trainable_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert 0 < result.num_truncated == sum(sample.finish_reason == "length" for sample in samples)
    assert result.content_hash == content_hash(samples)
    assert store.read(spec.outputs["dataset"].ref).facts["content_hash"] == result.content_hash
    assert store.read(spec.outputs["vocabulary"].ref).facts["result"] == result.model_dump(mode="json")
    assert result.generated_tokens > result.num_trainable_tokens / 2
    for sample in samples:
        assert sample.loss_mask[sample.prompt_length :].all()
        assert (sample.input_ids[-1] == END_ID) == (sample.finish_reason == "stop")
    assert not list(workspace.folder_of(spec, "conversations").glob("answers*"))


def test_the_vocabulary_has_the_most_frequent_training_answers(prepared: _Workspace) -> None:
    spec = prepared.spec(draft={"vocab_size": 20})
    result = prepared.run(spec)
    samples = read_dataset(prepared.folder_of(spec, "dataset"))
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample.split == "train":
            counts.update(sample.input_ids[sample.loss_mask == 1].tolist())
    ranked = sorted(counts, key=lambda token: (token != END_ID, -counts[token], token))
    vocabulary = load_vocabulary(prepared.folder_of(spec, "vocabulary"))
    assert vocabulary.draft_to_target.tolist() == sorted(ranked[:20])
    assert vocabulary.t2d.shape == (512,)
    answers = np.concatenate([sample.input_ids[sample.loss_mask == 1] for sample in samples])
    assert result.vocabulary_coverage == pytest.approx(np.isin(answers, ranked[:20]).mean())


def test_a_second_run_loads_no_engine_and_another_vocabulary_only_counts(
    prepared: _Workspace, finished: tuple[Path, PrepareResult]
) -> None:
    first = finished[1]
    second = prepared.run(prepared.spec())
    other = prepared.run(prepared.spec(draft={"vocab_size": None}))
    assert prepared.num_loads == 0
    assert second == first.model_copy(update={"generated_tokens": 0, "generated_tokens_per_second": None})
    assert other.content_hash == first.content_hash
    assert other.vocabulary_coverage == 1.0


def test_a_damaged_dataset_is_made_again_from_the_same_answers(
    prepared: _Workspace, finished: tuple[Path, PrepareResult]
) -> None:
    spec = prepared.spec()
    file = prepared.folder_of(spec, "dataset") / "samples.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    assert prepared.run(spec).content_hash == finished[1].content_hash
    assert prepared.num_loads == 0


def test_answers_of_a_killed_run_are_kept(workspace: _Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = workspace.spec()

    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_conversations", die)
        with pytest.raises(KeyboardInterrupt):
            workspace.run(spec)
    result = workspace.run(spec)
    assert (workspace.num_loads, result.generated_tokens) == (1, 0)
    assert result.num_kept > 0


def test_bad_rows_are_in_the_ledger_and_beyond_the_limit_an_error(workspace: _Workspace) -> None:
    workspace.add_rows(*BAD_ROWS, {"id": "\ud83d", "messages": [{"role": "user", "content": "x"}]})
    result = workspace.run(workspace.spec())
    assert result.num_read == NUM_PROMPTS + 3 == result.num_kept + len(result.rejected)
    places = {f"prompts.jsonl:{NUM_PROMPTS + number}" for number in (1, 2, 3)}
    assert places <= {rejection.key for rejection in result.rejected}
    strict = workspace.spec(data={"max_rejected_fraction": 0.01})
    with pytest.raises(DataError, match=r"of 19 conversations were rejected \(.*no user turn"):
        workspace.run(strict)
    assert workspace.num_loads == 1


def test_a_rehearsal_keeps_both_splits_and_only_warns_of_rejections(workspace: _Workspace) -> None:
    workspace.add_rows(*BAD_ROWS)
    result = workspace.run(workspace.spec(limit=6, data={"max_rejected_fraction": 0.0}))
    assert result.num_read == 8
    assert result.num_train >= 1
    assert result.num_heldout >= 1


def test_nothing_kept_is_an_error_and_leaves_no_dataset(workspace: _Workspace) -> None:
    workspace.prompts.write_text("")
    workspace.add_rows(*BAD_ROWS)
    spec = workspace.spec()
    with pytest.raises(DataError, match="no samples left: all 2 conversations were rejected"):
        workspace.run(spec)
    assert not workspace.folder_of(spec, "dataset").exists()
    assert workspace.num_loads == 0


def test_an_empty_split_is_an_error(workspace: _Workspace) -> None:
    spec = workspace.spec(data={"heldout_fraction": 0.0})
    with pytest.raises(DataError, match=r"in the split heldout; change data.heldout_fraction"):
        workspace.run(spec)
    assert not workspace.folder_of(spec, "dataset").exists()


def test_no_prompt_at_all_is_an_error(workspace: _Workspace) -> None:
    workspace.prompts.write_text("\n")
    with pytest.raises(DataError, match="no prompts were found"):
        workspace.run(workspace.spec())


def test_prompts_that_changed_after_the_plan_are_refused(
    tmp_path: Path, make_config: Callable[..., RunConfig]
) -> None:
    workspace = _Workspace(tmp_path, make_config)
    spec = workspace.spec()
    workspace.prompts.write_text(workspace.prompts.read_text().replace("number 3", "number 33"))
    with pytest.raises(DataError, match=r"changed during the run: .*prompts\.jsonl; start the run again"):
        workspace.run(spec)
