"""Stages over a store in a bucket: what is checked before each is asked of the server, never downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.host.run_folder import create_run_folder
from eagle3_core.pipeline import StageError, run_stage
from eagle3_core.planning import plan_run
from tests.doubles.profile import stand_in_config
from tests.doubles.s3 import BUCKET, S3, running_s3

STAGES = ("prepare", "extract", "verify", "train")

pytestmark = pytest.mark.orchestrator


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running_s3() as server:
        server.reset()
        yield server


@pytest.fixture(scope="module")
def config(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run whose stages have made everything in the bucket."""
    server = {"endpoint_url": s3.proxy.url, "region": "us-east-1", "attempts": 2}
    config = stand_in_config(
        tmp_path_factory.mktemp("run"), store=f"s3://{BUCKET}/pipeline", object_store=server
    )
    create_run_folder(config, STAGES, "r")
    for stage in STAGES:
        assert not run_stage(stage, config, "r").reused
    return config


def downloads(s3: S3) -> list[str]:
    """Files of artifacts, their manifests apart, that were read since the requests were last cleared."""
    paths = [request.target.partition("?")[0] for request in s3.proxy.seen if request.method == "GET"]
    return [path for path in paths if "/pipeline/" in path and not path.endswith((".json", ".lease"))]


def test_reused_stages_ask_for_heads_and_read_no_shard(s3: S3, config: RunConfig) -> None:
    s3.proxy.seen.clear()
    assert all(run_stage(stage, config, "r").reused for stage in STAGES)
    assert not [path for path in downloads(s3) if "/capture/" in path or "/checkpoint/" in path]
    asked = {request.target for request in s3.proxy.seen if request.method == "HEAD"}
    assert sum("/capture/" in target for target in asked) == 4


def test_a_run_on_another_host_reuses_what_the_bucket_holds(s3: S3, config: RunConfig) -> None:
    shutil.rmtree(config.store_path)
    assert all(run_stage(stage, config, "r").reused for stage in STAGES)
    assert not list(config.store_path.rglob("shard-*"))


def test_a_shard_that_the_bucket_lost_is_one_line_and_made_again_alone(s3: S3, config: RunConfig) -> None:
    longer = config.model_copy(update={"train": config.train.model_copy(update={"num_epochs": 3})})
    lost = f"pipeline/{plan_run(config).artifacts['capture'].ref}/shard-00002.safetensors"
    s3.client().delete_object(Bucket=BUCKET, Key=lost)
    for stage in ("verify", "train"):
        with pytest.raises(StageError, match=rf"s3://{BUCKET}/{lost}") as caught:
            run_stage(stage, longer, "r")
        assert len(str(caught.value).splitlines()) == 1
    assert run_stage("extract", longer, "r").result["num_new_shards"] == 1
    assert run_stage("verify", longer, "r").reused
    assert not run_stage("train", longer, "r").reused


def failure(stage: str, config: RunConfig) -> str:
    with pytest.raises(StageError) as caught:
        run_stage(stage, config, "r")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_wrong_credentials_are_one_line_and_the_run_goes_on_once_they_are_right(
    s3: S3, config: RunConfig
) -> None:
    s3.require_credentials(True)
    try:
        assert "does not accept the credentials" in failure("verify", config)
    finally:
        s3.require_credentials(False)
    assert run_stage("verify", config, "r").reused


def test_a_missing_bucket_is_one_line_and_the_run_goes_on_once_it_is_there(s3: S3, config: RunConfig) -> None:
    elsewhere = config.model_copy(update={"store": "s3://made-later/x"})
    assert "the bucket of s3://made-later/x" in failure("prepare", elsewhere)
    s3.client().create_bucket(Bucket="made-later")
    assert not run_stage("prepare", elsewhere, "r").reused
    assert run_stage("prepare", elsewhere, "r").reused
