"""What `eagle3 deploy` makes in the API; that the deployments run is a whole-run test."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.orchestrator


def test_a_work_pool_that_somebody_makes_at_the_same_time_is_no_error(api, monkeypatch):
    from prefect.client.orchestration import SyncPrefectClient, get_client
    from prefect.exceptions import ObjectNotFound

    from flows.deploy import _ensure_work_pool

    def not_yet(client, name):
        raise ObjectNotFound(KeyError(name))

    monkeypatch.setattr(SyncPrefectClient, "read_work_pool", not_yet)
    with get_client(sync_client=True) as client:
        assert [_ensure_work_pool(client) for _ in range(2)] == ["work pool eagle3 made"] * 2
