"""Packages that can be imported and whose attributes raise when called; see the README beside this file."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Placeholder:
    """Something that is named and passed around, but must not be used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(f"the placeholder {self._name} has no {name}")
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(
            f"SGLang called {self._name}, which has no CPU version here: this target can be captured with "
            "SGLang on a GPU only"
        )


class Submodules(MetaPathFinder, Loader):
    """Finds every submodule of one placeholder package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a submodule, or None for a module of another package."""
        return ModuleSpec(name, self, is_package=True) if name.startswith(self._prefix) else None

    def exec_module(self, module: ModuleType) -> None:
        """Let the module find every attribute."""
        module.__getattr__ = Placeholder(module.__name__).__getattr__  # type: ignore[method-assign]


def make_placeholder(package: str) -> None:
    """Turn an imported, empty package into a placeholder with all attributes and submodules."""
    finder = Submodules(package)
    finder.exec_module(sys.modules[package])
    sys.meta_path.append(finder)
