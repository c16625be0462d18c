from __future__ import annotations

import re
from typing import Any

import pytest

from eagle3_core.config import PROJECT_ROOT
from tests.deployments.loading import load_script

pytestmark = pytest.mark.orchestrator

PAGES = ("README.md", "CONTRIBUTING.md", "docs/design.md")


def test_the_configuration_page_is_in_step_with_the_code() -> None:
    script: Any = load_script("docs/make_configuration.py")
    assert script.PAGE.read_text() == script.page(), "run `make docs`"


def test_the_compatibility_page_is_in_step_with_the_records() -> None:
    script: Any = load_script("docs/make_compatibility.py")
    assert script.PAGE.read_text() == script.page(), "run `make compatibility`"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    folder = (PROJECT_ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)", (PROJECT_ROOT / page).read_text())
    missing = [link for link in links if "://" not in link and not (folder / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_commands_that_are_named_exist(page: str) -> None:
    from flows.cli import app

    text = (PROJECT_ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT_ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    assert set(re.findall(r"(?:`|^)eagle3 ([a-z]+)", text, re.MULTILINE)) <= commands


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (PROJECT_ROOT / page).read_text()
    named = set(re.findall(r"`((?:eagle3_core|tests|docs|deployments|docker|flows|tasks)/[\w./-]+)`", text))
    assert not [path for path in named if not (PROJECT_ROOT / path).exists()]
