"""What may go: policies name, and what is needed, used or not replaced stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.sections import RetentionConfig
from eagle3_core.store.local import LocalStore
from eagle3_core.store.retention import Verdict, decide
from tests.store.artifacts import NOW, add, add_run, replace_manifest


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def fates(store: LocalStore, policy: RetentionConfig, **given: Any) -> dict[ArtifactRef, Verdict]:
    verdicts = decide(store.list(), policy, NOW, given.pop("in_use", {}), **given)
    return {verdict.ref: verdict for verdict in verdicts}


def going(store: LocalStore, policy: RetentionConfig, **given: Any) -> set[ArtifactRef]:
    return {ref for ref, verdict in fates(store, policy, **given).items() if verdict.goes}


def why(store: LocalStore, policy: RetentionConfig, ref: ArtifactRef, **given: Any) -> str:
    return "; ".join(fates(store, policy, **given)[ref].kept_because)


OLD = RetentionConfig(older_than_days=14)
LAST = RetentionConfig(keep_last_captures=1)


def test_without_a_policy_nothing_is_named(store):
    add_run(store, "a", age_days=100)
    add_run(store, "b", age_days=1)
    assert going(store, RetentionConfig()) == set()


def test_a_replaced_run_goes_whole_when_it_is_old_and_the_newest_of_a_profile_stays(store):
    old, new = add_run(store, "a", age_days=30), add_run(store, "b", age_days=20)
    assert going(store, OLD) == old.refs
    assert "no newer, benchmarked export of the profile demo" in why(store, OLD, new.export)


def test_a_capture_stays_while_a_checkpoint_that_stays_was_made_from_it(store):
    old = add_run(store, "a", age_days=30)
    add_run(store, "b", age_days=1)
    assert going(store, LAST) == set()
    assert "was made from it and stays" in why(store, LAST, old.capture)


def test_a_capture_of_which_nothing_was_made_goes_with_its_verification_and_leaves_its_dataset(store):
    old = add_run(store, "a", age_days=30, upto="verification")
    add_run(store, "b", age_days=1)
    assert going(store, LAST) == {old.capture, old.verification}


def test_an_old_capture_stays_until_its_replacement_is_complete_and_verified(store):
    old = add_run(store, "a", age_days=30, upto="verification")
    new = add_run(store, "b", age_days=1, upto="capture")
    assert going(store, LAST) == set()
    assert "no newer, verified capture of the profile demo" in why(store, LAST, old.capture)
    parents = {"capture": new.capture}
    check = add(store, "verification", {"name": "b"}, parents, capture_content="of other files")
    assert going(store, LAST) == set()
    content = store.read(new.capture).content
    replace_manifest(store, check.model_copy(update={"facts": {"capture_content": content}}))
    assert going(store, LAST) == {old.capture, old.verification}


def test_a_rehearsal_replaces_no_whole_capture_and_a_whole_one_replaces_a_rehearsal(store):
    whole = add_run(store, "a", age_days=30, upto="verification")
    rehearsal = add_run(store, "b", age_days=20, limit=10, upto="verification")
    assert going(store, LAST) == set()
    add_run(store, "c", age_days=1)
    assert going(store, LAST) == {
        whole.capture,
        whole.verification,
        rehearsal.capture,
        rehearsal.verification,
    }


def test_another_profile_replaces_a_capture_only_of_the_same_target_and_dataset(store):
    old = add_run(store, "a", age_days=30, upto="verification", content="same")
    add_run(store, "b", age_days=2, profile="other", content="else")
    assert going(store, LAST) == set()
    add_run(store, "c", age_days=1, profile="third", content="same")
    assert going(store, LAST) == {old.capture, old.verification}


def test_what_a_run_uses_stays_and_what_it_was_made_from(store):
    old = add_run(store, "a", age_days=30)
    add_run(store, "b", age_days=20)
    in_use = {old.capture: "the run x uses it"}
    assert going(store, OLD, in_use=in_use) == old.refs - {
        old.capture, old.verification, old.dataset, old.conversations
    }  # fmt: skip
    assert why(store, OLD, old.capture, in_use=in_use) == "the run x uses it"


def test_what_is_listed_stays_with_its_whole_lineage(store):
    old = add_run(store, "a", age_days=30)
    add_run(store, "b", age_days=20)
    policy = RetentionConfig(older_than_days=14, keep=(str(old.export),))
    assert going(store, policy) == {old.benchmark}


def test_unreferenced_names_data_without_a_checkpoint_that_stays(store):
    old = add_run(store, "a", age_days=30, upto="verification")
    used = add_run(store, "b", age_days=20)
    assert going(store, RetentionConfig(unreferenced=True)) == old.refs
    newest = add_run(store, "c", age_days=1, upto="verification")
    assert going(store, RetentionConfig(unreferenced=True)) == old.refs
    assert newest.capture not in going(store, RetentionConfig(unreferenced=True, older_than_days=0.5))
    assert used.capture not in going(store, RetentionConfig(unreferenced=True, older_than_days=0.5))


def test_over_a_size_the_oldest_captures_go_and_no_more_than_needed(store):
    runs = [
        add_run(store, name, age_days=age, upto="verification", size=1000)
        for name, age in zip("abcd", (40, 30, 20, 10), strict=True)
    ]
    total = sum(manifest.bytes for manifest in store.list())
    assert going(store, RetentionConfig(max_bytes=total)) == set()
    assert going(store, RetentionConfig(max_bytes=total - 1)) == {runs[0].capture, runs[0].verification}
    two = going(store, RetentionConfig(max_bytes=total - 1001))
    assert two == {runs[0].capture, runs[0].verification, runs[1].capture, runs[1].verification}
    assert runs[3].capture not in going(store, RetentionConfig(max_bytes=0))


def test_policies_together_name_what_any_of_them_names(store):
    idle = add_run(store, "a", age_days=5, upto="verification")
    old = add_run(store, "b", age_days=30)
    add_run(store, "c", age_days=2)
    both = RetentionConfig(older_than_days=14, keep_last_captures=1)
    assert going(store, both) == old.refs | {idle.capture, idle.verification}


def test_a_person_can_name_what_is_needed_and_only_that_goes(store):
    only = add_run(store, "a", age_days=1)
    assert going(store, RetentionConfig(), forced={only.capture}) == {only.capture, only.verification}


def test_a_partial_capture_counts_for_nothing_and_goes_once_it_is_replaced(store):
    partial = add(store, "capture", {"target": "t", "content": "x"}, age_days=3, complete=False)
    assert going(store, LAST) == set()
    assert going(store, RetentionConfig(unreferenced=True, older_than_days=1)) == set()
    add_run(store, "b", age_days=1)
    assert going(store, LAST) == {partial.ref}


def test_while_a_manifest_cannot_be_read_no_policy_moves_anything(store):
    add_run(store, "a", age_days=30)
    add_run(store, "b", age_days=20)
    assert going(store, OLD, unreadable=["checkpoint/0123456789abcdef"]) == set()


def test_what_was_made_last_goes_first(store):
    add_run(store, "a", age_days=30)
    add_run(store, "b", age_days=20)
    order = [ref.kind for ref, verdict in fates(store, OLD).items() if verdict.goes]
    assert order == [
        "benchmark", "export", "checkpoint", "labels", "capture", "verification", "vocabulary", "dataset",
        "conversations",
    ]  # fmt: skip


def test_a_verification_without_its_capture_is_unreferenced(store):
    run = add_run(store, "a", age_days=1)
    shutil.rmtree(store.folder(run.capture))
    assert going(store, RetentionConfig(unreferenced=True)) == {run.verification}
