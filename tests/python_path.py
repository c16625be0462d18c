"""Where a process that a test starts finds the project, and what this process was told to add."""

from __future__ import annotations

import os

from eagle3_core.config import PROJECT_ROOT


def python_path() -> str:
    """For `PYTHONPATH`: the project before what is there already."""
    return os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
