"""Ids, manifests and identities."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
from pydantic import ValidationError

from eagle3_core import artifacts
from eagle3_core.artifacts import (
    ArtifactPlan,
    ArtifactRef,
    FileEntry,
    Manifest,
    canonical_json,
    differing_keys,
    identity_hash,
    provenance,
)
from eagle3_core.errors import StoreError


def test_an_id_is_the_hash_of_kind_and_identity():
    text = b'{"identity":{"a":1,"b":[2]},"kind":"dataset"}'
    assert identity_hash("dataset", {"b": [2], "a": 1}) == hashlib.sha256(text).hexdigest()[:16]


def test_the_order_of_keys_does_not_matter_and_the_kind_does():
    assert identity_hash("dataset", {"a": 1, "b": 2}) == identity_hash("dataset", {"b": 2, "a": 1})
    assert identity_hash("dataset", {"a": 1}) != identity_hash("capture", {"a": 1})


def test_canonical_json_keeps_text_as_it_is():
    assert canonical_json({"ü": 1.5, "a": None}) == '{"a":null,"ü":1.5}'.encode()


def test_a_reference_reads_what_it_writes():
    ref = ArtifactRef(kind="capture", id="0123456789abcdef")
    assert ArtifactRef.parse(str(ref)) == ref


@pytest.mark.parametrize("text", ["capture", "nothing/0123456789abcdef", "capture/0123", ""])
def test_what_names_no_artifact_is_refused_with_the_kinds(text):
    with pytest.raises(StoreError, match="KIND one of conversations, dataset"):
        ArtifactRef.parse(text)


def test_an_id_of_other_characters_is_refused():
    with pytest.raises(ValidationError):
        ArtifactRef(kind="capture", id="../../etc/passwd")


def test_differences_are_listed_leaf_by_leaf():
    ours = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    theirs = {"a": 1, "b": {"c": 5, "d": 3}, "f": 6}
    assert differing_keys(ours, theirs) == ["b.c: 2 != 5", "e: 4 != None", "f: None != 6"]


def test_a_plan_knows_its_name_before_the_work_starts():
    plan = ArtifactPlan(kind="dataset", identity={"a": 1})
    assert plan.ref == ArtifactRef(kind="dataset", id=identity_hash("dataset", {"a": 1}))


def test_provenance_is_no_part_of_an_identity():
    entry = FileEntry(path="f", bytes=3, xxh3_128="0")
    manifest = Manifest(
        ref=ArtifactPlan(kind="dataset", identity={"a": 1}).ref,
        state="complete",
        identity={"a": 1},
        parents={},
        files=(entry,),
        provenance=provenance("some-run", 1.5),
    )
    assert manifest.bytes == 3
    assert manifest.file("f") == entry
    assert manifest.file("g") is None
    assert identity_hash(manifest.ref.kind, manifest.identity) == manifest.ref.id


def test_the_commit_is_marked_when_tracked_files_differ_and_not_for_a_profile_of_ones_own(
    tmp_path, monkeypatch
):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments])

    monkeypatch.setattr(artifacts, "PROJECT_ROOT", tmp_path)
    code = tmp_path / "code.py"
    code.write_text("x = 1\n")
    git("init", "--quiet")
    git("add", "code.py")
    git("commit", "--quiet", "--no-gpg-sign", "-m", "first")
    (tmp_path / "my-profile.yaml").write_text("name: mine\n")
    git_commit = artifacts.git_commit.__wrapped__  # the answer is kept for the process
    commit = git_commit()
    assert len(commit) == 40
    code.write_text("x = 2\n")
    assert git_commit() == f"{commit}+changes"


@pytest.mark.parametrize(
    "text", ["capture", "capture/1", "capture/ZZZZZZZZZZZZZZZZ", "nothing/0123456789abcdef"]
)
def test_text_that_names_no_artifact_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match="names no artifact"):
        ArtifactRef.parse(text)
