from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT, parse_config
from eagle3_core.errors import ConfigError
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_root, open_store
from eagle3_core.store.remote import RemoteStore


def opened(tmp_path: Path, store: str | None) -> LocalStore:
    document = {"name": "x", "target": {"model": "smollm2-135m"}, "workspace": str(tmp_path), "store": store}
    return open_store(parse_config(document))


@pytest.mark.parametrize("open_it", [opened, lambda workspace, store: open_root(store, workspace)])
def test_a_configuration_and_a_command_open_the_same_store(tmp_path: Path, open_it) -> None:
    local, named, bucket = (
        open_it(tmp_path, store) for store in (None, "some/folder", "s3://my-bucket/a/b/")
    )
    assert (type(local), local.root) == (LocalStore, tmp_path / "store")
    assert (type(named), named.root) == (LocalStore, PROJECT_ROOT / "some" / "folder")
    assert isinstance(bucket, RemoteStore)
    assert bucket.place == "s3://my-bucket/a/b"
    assert bucket.root.parent == tmp_path / "cache" / "s3"
    assert not bucket.root.exists()


def test_mirrors_of_different_roots_are_apart_and_a_slash_makes_no_difference(tmp_path: Path) -> None:
    roots = {
        opened(tmp_path, store).root
        for store in ("s3://one-bucket/a", "s3://one-bucket/a/", "s3://one-bucket/b")
    }
    assert len(roots) == 2


@pytest.mark.parametrize("open_it", [opened, lambda workspace, store: open_root(store, workspace)])
def test_an_empty_name_is_not_the_checkout(tmp_path: Path, open_it) -> None:
    with pytest.raises(ConfigError, match="its name is empty: leave it out"):
        open_it(tmp_path, "")


def test_a_command_refuses_a_url_that_names_no_bucket(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the store gs://x/y cannot be opened: a store is a folder or s3://"
    ):
        open_root("gs://x/y", tmp_path)
