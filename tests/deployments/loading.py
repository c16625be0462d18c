"""Loads scripts that are not part of a package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from eagle3_core.config import PROJECT_ROOT


def load_script(path: str) -> ModuleType:
    """The module of a script, by its path in the checkout."""
    file = PROJECT_ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
