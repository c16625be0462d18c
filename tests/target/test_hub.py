"""A target on a hub is described from headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import TargetError
from eagle3_core.target.files import FolderFiles
from eagle3_core.target.hub import HubFiles
from eagle3_core.target.info import describe_target
from eagle3_core.target.lookup import ON_THE_HUB, look_up_target
from tests.target.files import LLAMA, write_sharded
from tests.target.hub_server import COMMIT, HubServer, serve_hub

pytest.importorskip("huggingface_hub")

MEBIBYTE = 1 << 20
FILES = {
    "model-1.safetensors": {"model.embed_tokens.weight": [16, 8], "model.layers.0.weight": [MEBIBYTE, 1]},
    "model-2.safetensors": {
        "model.norm.weight": [8],
        "lm_head.weight": [16, 8],
        "model.filler": [MEBIBYTE, 1],
    },
}
HEADER_REQUEST_BYTES = 100_001


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    folder = write_sharded(tmp_path / "hub" / "org" / "model", LLAMA, FILES)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 13}}}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve_hub(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def config(tmp_path: Path, model: str = "org/model", revision: str | None = None) -> RunConfig:
    target = {"model": model, "revision": revision}
    return parse_config({"name": "x", "target": target, "workspace": str(tmp_path / "workspace")})


def test_only_the_headers_of_weights_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    info, note = look_up_target(config(tmp_path))
    assert (info.path, info.num_layers, info.vocab_size, info.padded_rows) == ("org/model", 8, 16, 2)
    assert info.norm.file == "model-2.safetensors"
    assert info.num_parameters == 2 * (16 * 8) + 8 + 2 * MEBIBYTE
    assert info.weights_bytes > 8 * MEBIBYTE
    assert note == ON_THE_HUB
    for name in FILES:
        assert 0 < hub.sent[name] <= HEADER_REQUEST_BYTES
    assert not (tmp_path / "cache").exists()


def test_the_hub_tells_the_same_as_the_folder_without_its_weights(hub: HubServer) -> None:
    there = describe_target(HubFiles("org/model"))
    here = describe_target(FolderFiles(hub.root / "org" / "model"))
    assert there.model_copy(update={"path": here.path}) == here
    assert there.fingerprint.startswith("headers:")


def test_token_and_revision_are_the_users(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-user")
    for revision in ("main", COMMIT):
        look_up_target(config(tmp_path, revision=revision))
    assert hub.tokens == {"Bearer hf_of-the-user"}
    assert HubFiles("org/model").commit == COMMIT


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("org/other", None, "org/other is not on the hub or not open to you"),
        ("org/model", "v9", "org/model at v9 has no such revision"),
        ("org/closed", None, "org/closed needs an accepted licence"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(
    hub: HubServer, tmp_path: Path, model: str, revision: str | None, message: str
) -> None:
    (hub.root / "org" / "closed").mkdir()
    hub.gated.add("org/closed")
    with pytest.raises(TargetError, match=message) as caught:
        look_up_target(config(tmp_path, model, revision))
    assert hub.url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TargetError, match=r"org/model could not be read .*check the connection"):
        HubFiles("org/model")


def test_a_snapshot_that_has_only_a_configuration_is_looked_up_on_the_hub(
    hub: HubServer, tmp_path: Path
) -> None:
    repository = tmp_path / "cache" / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    assert look_up_target(config(tmp_path, revision=COMMIT))[1] == ON_THE_HUB
