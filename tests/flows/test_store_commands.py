"""The commands gc, verify and lineage on a store without runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_core.errors import EXIT_OK, EXIT_USER_ERROR, ConfigError
from eagle3_core.store.local import LocalStore
from tests.doubles.profile import stand_in_profile
from tests.store.artifacts import Chain, add_run

pytestmark = pytest.mark.orchestrator


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "workspace" / "store")


@pytest.fixture
def runs(store: LocalStore) -> tuple[Chain, Chain]:
    """Two runs of long ago; the newer one replaces the other."""
    return add_run(store, "a", age_days=30), add_run(store, "b", age_days=1)


def eagle3(store: LocalStore, *arguments: str) -> int:
    from flows.cli import main

    return main([*arguments, "--store", str(store.root), "--workspace", str(store.root.parent)])


def test_gc_without_a_policy_only_shows_what_there_is(store, runs, capsys):
    assert eagle3(store, "gc") == EXIT_OK
    text = capsys.readouterr().out
    assert "no policy was given" in text
    assert "no policy names it" in text
    assert set(store.refs()) == runs[0].refs | runs[1].refs


def test_an_empty_store_and_an_empty_trash_are_called_so(store, capsys):
    store.root.mkdir(parents=True)
    assert eagle3(store, "gc", "--dry-run") == EXIT_OK
    assert capsys.readouterr().out == f"the store {store.root} is empty\n"
    assert eagle3(store, "gc", "--restore", "ffff") == EXIT_USER_ERROR
    assert capsys.readouterr().err == "eagle3: 'ffff' cannot be restored: the trash is empty\n"


def test_a_beginning_that_no_artifact_has_is_told_so(store, runs, capsys):
    assert eagle3(store, "lineage", "export/abc") == EXIT_USER_ERROR
    assert f"no artifact in {store.root} begins with 'export/abc'; " in capsys.readouterr().err


def test_gc_of_a_store_that_is_not_there_is_no_success(store, capsys):
    assert eagle3(store, "gc", "--older-than", "1d") == EXIT_USER_ERROR
    assert (
        capsys.readouterr().err == f"eagle3: there is no store at {store.root}; set --store or --workspace\n"
    )


@pytest.mark.parametrize("other", [["--dry-run"], ["--purge"], ["--keep-last", "1"]])
def test_gc_restores_nothing_where_something_else_is_asked_for_too(store, runs, capsys, other):
    assert eagle3(store, "gc", "--older-than", "1d") == EXIT_OK
    assert eagle3(store, "gc", "--restore", runs[0].capture.id, *other) == EXIT_USER_ERROR
    assert "--restore goes alone" in capsys.readouterr().err
    assert runs[0].capture not in store.refs()


def test_gc_purges_all_or_what_is_old_not_both(store, runs, capsys):
    assert eagle3(store, "gc", "--older-than", "1d") == EXIT_OK
    assert eagle3(store, "gc", "--purge", "--purge-after", "7d") == EXIT_USER_ERROR
    assert "--purge removes all" in capsys.readouterr().err
    assert store.trash().entries()


def test_gc_moves_says_why_restores_and_purges(store, runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    old, new = runs
    assert eagle3(store, "gc", "--older-than", "1d", "--dry-run") == EXIT_OK
    assert "would go to trash" in capsys.readouterr().out
    assert eagle3(store, "gc", "--older-than", "1d") == EXIT_OK
    text = capsys.readouterr().out
    assert f"to trash  {old.capture}" in text
    assert f"kept      {new.export}" in text
    assert "no newer, benchmarked export of the profile demo replaces it" in text
    assert set(store.refs()) == new.refs
    assert eagle3(store, "gc", "--restore", old.capture.id) == EXIT_OK
    assert old.capture in store.refs()
    capsys.readouterr()
    assert eagle3(store, "gc", "--purge", "--json") == EXIT_OK
    assert json.loads(capsys.readouterr().out)["purged_bytes"] > 0
    assert store.trash().entries() == []


def test_gc_is_readable_in_80_columns_and_says_all_in_wide_ones(store, runs, capsys, monkeypatch):
    """Of each artifact a line, the reasons beside it in the last column."""
    old, new = runs
    monkeypatch.setenv("COLUMNS", "80")
    assert eagle3(store, "gc", "--older-than", "1d", "--dry-run") == EXIT_OK
    *table, closing = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80
    assert f"would go  conversations/{old.conversations.id[:8]}  " in "\n".join(table)
    start = table[0].index("why")
    assert all(line[:start].isspace() or line[:8].rstrip() in ("what", "would go", "kept") for line in table)
    reasons = " ".join(line[start:].strip() for line in table)
    assert f"benchmark/{new.benchmark.id[:8]} was made from it and stays" in reasons
    assert "would move 90 B" in closing
    monkeypatch.setenv("COLUMNS", "160")
    assert eagle3(store, "gc", "--older-than", "1d", "--dry-run") == EXIT_OK
    assert f"{new.benchmark} was made from it and stays" in capsys.readouterr().out


def test_gc_shows_an_artifact_whose_age_nobody_can_read(store, runs, capsys):
    (store.folder(runs[0].export) / "manifest.json").write_text("{")
    assert eagle3(store, "gc") == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert any(f"export/{runs[0].export.id[:8]}" in line and " –  " in line for line in lines)


def test_gc_takes_the_policies_of_a_profile_and_options_replace_them(tmp_path, capsys):
    profile = stand_in_profile(tmp_path, retention={"older_than_days": 14, "keep": []})
    store = LocalStore(tmp_path / "workspace" / "store")
    old, new = add_run(store, "a", age_days=30), add_run(store, "b", age_days=1)
    from flows.cli import main

    assert main(["gc", str(profile), "--older-than", "9000d", "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["trashed_bytes"] == 0
    assert main(["gc", str(profile), "--keep", str(old.export), "--json"]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    moved = {line["artifact"] for line in report["lines"] if line["action"] == "to trash"}
    assert moved == {str(old.benchmark)}
    assert set(store.refs()) == new.refs | old.refs - {old.benchmark}
    assert main(["gc", str(profile), "--store", str(store.root)]) == EXIT_USER_ERROR


def test_gc_moves_what_a_person_names_whatever_needs_it(store, runs, capsys):
    _, new = runs
    assert eagle3(store, "gc", "--force", new.capture.id[:8], "--json") == EXIT_OK
    lines = {line["artifact"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines[str(new.capture)]["reasons"] == ["named with --force"]
    assert new.capture not in store.refs()
    assert new.checkpoint in store.refs()
    assert eagle3(store, "gc", "--force", "capture/0000000000000000") == EXIT_USER_ERROR
    assert capsys.readouterr().err.count("\n") == 1


def test_every_command_takes_a_kind_and_the_beginning_of_an_id(store, runs, capsys):
    old, new = runs
    assert eagle3(store, "verify", f"export/{new.export.id[:7]}") == EXIT_OK
    assert eagle3(store, "lineage", f"benchmark/{new.benchmark.id[:7]}", "--dot") == EXIT_OK
    assert eagle3(store, "gc", "--older-than", "1d", "--keep", f"export/{old.export.id[:7]}") == EXIT_OK
    assert set(store.refs()) == new.refs | old.refs - {old.benchmark}
    assert eagle3(store, "gc", "--restore", f"benchmark/{old.benchmark.id[:7]}") == EXIT_OK
    assert eagle3(store, "gc", "--force", f"capture/{new.capture.id[:7]}") == EXIT_OK
    assert set(store.refs()) == (new.refs | old.refs) - {new.capture, new.verification}
    capsys.readouterr()
    for option in ("--keep", "--force", "--restore"):
        assert eagle3(store, "gc", option, f"capture/{new.export.id[:7]}") == EXIT_USER_ERROR
        assert eagle3(store, "gc", option, "export/") == EXIT_USER_ERROR
    assert capsys.readouterr().err.count("\n") == 6


def test_gc_takes_the_beginning_of_what_has_no_manifest_that_can_be_read(store, runs, capsys):
    broken, half = runs[0].benchmark, store.root / "labels" / "fedcba9876543210"
    (store.folder(broken) / "manifest.json").write_text("{")
    half.mkdir()
    for name in (f"benchmark/{broken.id[:7]}", "labels/fedcba9"):
        assert eagle3(store, "gc", "--force", name) == EXIT_OK
    assert broken not in store.refs()
    assert not half.exists()


@pytest.mark.parametrize("option", [("--older-than", "soon"), ("--over", "much"), ("--purge-after", "-3d")])
def test_gc_refuses_spans_and_sizes_that_it_cannot_read(store, option, capsys):
    assert eagle3(store, "gc", *option) == EXIT_USER_ERROR
    assert "expected such as" in capsys.readouterr().err


def test_spans_of_time_and_sizes_are_read_with_their_units():
    from flows.gc_view import days, size

    assert [days(text) for text in ("14d", "36h", "2w", "90m", "3")] == [14, 1.5, 14, 0.0625, 3]
    assert size("500GiB") == 500 << 30
    with pytest.raises(ConfigError):
        days("14 days ago")
    with pytest.raises(ConfigError, match="at most 36500d"):
        days("99999999999999d")


def test_verify_says_what_is_wrong_a_line_each_and_ends_with_2(store, runs, capsys):
    ref = runs[1].export
    assert eagle3(store, "verify", str(ref)) == EXIT_OK
    assert f"{ref} in {store.root}: right; 1 file, " in capsys.readouterr().out
    (store.folder(ref) / "content.bin").unlink()
    assert eagle3(store, "verify", str(ref)) == EXIT_USER_ERROR
    assert "is missing" in capsys.readouterr().out
    assert eagle3(store, "verify", str(ref), "--json") == EXIT_USER_ERROR
    assert json.loads(capsys.readouterr().out)["problems"][0]["where"] == "content.bin"
    assert eagle3(store, "verify", "export/0000000000000000") == EXIT_USER_ERROR


def test_verify_of_a_capture_needs_to_know_what_made_it_unless_only_its_files_count(store, runs, capsys):
    ref = runs[1].capture
    assert eagle3(store, "verify", str(ref)) == EXIT_USER_ERROR
    assert "--profile, or check the files alone with --files-only" in capsys.readouterr().err
    assert eagle3(store, "verify", str(ref), "--files-only") == EXIT_OK
    assert "what the states mean was not checked" in capsys.readouterr().out


def test_lineage_is_a_tree_json_or_a_graph(store, runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    ref = runs[1].benchmark
    assert eagle3(store, "lineage", str(ref)) == EXIT_OK
    text = capsys.readouterr().out
    assert "prompts.jsonl" in text
    assert "target target/t ORG/NAME" in text
    assert f"dataset {runs[1].dataset} as above" in text
    assert eagle3(store, "lineage", str(ref), "--json") == EXIT_OK
    assert json.loads(capsys.readouterr().out)["artifact"] == str(ref)
    assert eagle3(store, "lineage", str(ref), "--dot") == EXIT_OK
    assert capsys.readouterr().out.startswith("digraph lineage {")
    assert eagle3(store, "lineage", str(ref), "--dot", "--json") == EXIT_USER_ERROR


def test_lineage_says_plainly_what_is_gone(store, runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, new = runs
    eagle3(store, "gc", "--force", str(new.capture))
    capsys.readouterr()
    eagle3(store, "lineage", str(new.export))
    advice = f"`eagle3 gc --restore {new.capture}` puts it back"
    assert f"{new.capture} is in the trash: {advice}" in capsys.readouterr().out
    for name in (str(new.capture), f"capture/{new.capture.id[:7]}"):
        assert eagle3(store, "lineage", name) == EXIT_USER_ERROR
        assert f"{new.capture} is in the trash of {store.root}; {advice}" in capsys.readouterr().err
    eagle3(store, "gc", "--purge")
    capsys.readouterr()
    eagle3(store, "lineage", str(new.export))
    assert "is not in the store any more: what it was made from is not known" in capsys.readouterr().out
