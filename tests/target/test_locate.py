from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import TargetError
from eagle3_core.target.locate import fetch_spec, hub_cache, is_builtin, target_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _config(model: str, workspace: Path, **target: str) -> RunConfig:
    return parse_config({"name": "x", "target": {"model": model, **target}, "workspace": str(workspace)})


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one snapshot of org/model on branch main."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_builtin_target_lies_in_the_workspace_and_can_be_fetched(tmp_path: Path) -> None:
    config = _config("smollm2-135m", tmp_path)
    assert is_builtin("smollm2-135m")
    assert target_folder(config) == tmp_path / "targets" / "smollm2-135m"
    assert fetch_spec(config).destination == str(target_folder(config))


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert target_folder(_config(str(tmp_path / "mine"), tmp_path)) == tmp_path / "mine"
    with pytest.raises(TargetError, match="no built-in target"):
        fetch_spec(_config(str(tmp_path / "mine"), tmp_path))


def test_a_builtin_target_that_is_misspelled_is_told_which_is_near(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r", perhaps smollm2-135m is meant; expected "):
        target_folder(_config("smollm2-135n", tmp_path))


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_hub_id_is_found_in_the_cache_by_branch_or_commit(
    cached: Path, tmp_path: Path, revision: str | None
) -> None:
    extra = {"revision": revision} if revision else {}
    assert target_folder(_config("org/model", tmp_path, **extra)) == cached


@pytest.mark.parametrize(
    ("model", "revision"), [("org/other", "main"), ("org/model", "v2"), ("../x y", "main")]
)
def test_what_cannot_be_found_is_one_line_with_a_remedy(
    cached: Path, tmp_path: Path, model: str, revision: str
) -> None:
    with pytest.raises(TargetError) as caught:
        target_folder(_config(model, tmp_path, revision=revision))
    assert repr(model) in str(caught.value)
    assert "hf download" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cache_follows_the_hub_clients_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache() == tmp_path / "home" / "hub"
