"""The two environments stay apart: no Prefect in the core, no torch in the orchestrator."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT

pytestmark = pytest.mark.both


CORE = sorted((PROJECT_ROOT / "eagle3_core").rglob("*.py"))
ORCHESTRATOR = sorted([*(PROJECT_ROOT / "tasks").rglob("*.py"), *(PROJECT_ROOT / "flows").rglob("*.py")])
ENGINE_PACKAGES = {"torch", "transformers", "vllm", "speculators"}
IN_BOTH = ("config", "artifacts", "identity", "contracts", "errors", "step", "planning", "lineage")


def imported(path: Path, only_top: bool = False) -> set[str]:
    """First names of the packages that a file imports, anywhere or at its top level."""
    tree = ast.parse(path.read_text())
    nodes = _top_level(tree) if only_top else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _top_level(tree: ast.Module):
    """Statements that run at import; `if TYPE_CHECKING` does not."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
def test_the_core_never_imports_prefect_or_what_is_above_it(path):
    assert not imported(path) & {"prefect", "tasks", "flows"}


@pytest.mark.parametrize("path", ORCHESTRATOR, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
def test_tasks_and_flows_never_import_an_engine_package(path):
    assert not imported(path) & ENGINE_PACKAGES


@pytest.mark.parametrize(
    "path",
    [path for path in CORE if path.parent.name in ("store", "host", "report") or path.stem in IN_BOTH],
    ids=lambda path: str(path.relative_to(PROJECT_ROOT)),
)
def test_modules_of_both_environments_import_no_engine_package_at_their_top(path):
    assert not imported(path, only_top=True) & ENGINE_PACKAGES


def test_modules_of_both_environments_can_be_imported_here_and_bring_no_torch():
    modules = [f"eagle3_core.{name}" for name in IN_BOTH]
    for package in ("store", "host"):
        modules += [f"eagle3_core.{package}.{path.stem}" for path in CORE if path.parent.name == package]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "sys.exit('torch' in sys.modules or 'prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT_ROOT).returncode == 0


def test_an_environment_has_prefect_or_torch_never_both():
    found = {name for name in ("prefect", "torch") if importlib.util.find_spec(name)}
    assert len(found) == 1
