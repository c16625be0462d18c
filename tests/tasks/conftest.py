"""The tasks' tests use the settings of the flow tests."""

from tests.flows.conftest import prefect_home

__all__ = ["prefect_home"]
