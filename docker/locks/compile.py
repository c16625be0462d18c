"""Regenerates the lock files beside it with uv: `make lock`.

The engine's lock becomes three files, because they are installed by separate pip calls: torch alone and
without a hash (its build, CPU or CUDA, depends on what the package index of the machine offers), the CUDA
libraries that only torch's CUDA build needs, and everything else. The last two carry hashes. The capture
environment of SGLang takes the same torch, so its lock is everything else, with triton, which SGLang imports
on the CPU too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
INDEX = "https://pypi.org/simple"
PYTHON = "3.11"
HEADER = "# Made by docker/locks/compile.py (`make lock`); do not edit by hand.\n"
TORCH = re.compile(r"^torch==")
CUDA_LIBRARY = re.compile(r"^(nvidia-(?!ml-py\b)|cuda-|triton==)")


def main() -> int:
    """Compile all environments; the path of uv is the only argument."""
    uv = sys.argv[1] if len(sys.argv) > 1 else "uv"
    write("orchestrator.txt", compile_lock(uv, "orchestrator.in"))
    blocks = compile_lock(uv, "engine-cpu.in", "--override", "engine-cpu.overrides")
    torch = [block for block in blocks if TORCH.match(block)]
    cuda = [block for block in blocks if CUDA_LIBRARY.match(block)]
    write("engine-torch.txt", [torch[0].split()[0] + "\n"])
    write("engine-cuda-libs.txt", cuda)
    write("engine-cpu.txt", [block for block in blocks if block not in torch + cuda])
    blocks = compile_lock(uv, "engine-sglang-cpu.in", "--override", "engine-sglang-cpu.overrides")
    if [block.split()[0] for block in blocks if TORCH.match(block)] != [torch[0].split()[0]]:
        raise SystemExit("engine-sglang-cpu.in asks for another torch than engine-cpu.in")
    write("engine-sglang-cpu.txt", [block for block in blocks if not is_torch_or_its_library(block)])
    return 0


def is_torch_or_its_library(block: str) -> bool:
    """Whether the torch files have a requirement; triton is wanted without CUDA too."""
    return bool(TORCH.match(block) or (CUDA_LIBRARY.match(block) and not block.startswith("triton==")))


def compile_lock(uv: str, source: str, *options: str) -> list[str]:
    """The locked requirements, one text block (with its hashes) each; all Python versions and platforms."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--default-index", INDEX]
        subprocess.run([*command, *options, source, "--output-file", str(output)], cwd=HERE, check=True)
        return re.split(r"^(?=\S)", output.read_text(), flags=re.MULTILINE)[1:]


def write(name: str, blocks: list[str]) -> None:
    """Write one lock file."""
    (HERE / name).write_text(HEADER + "".join(blocks))
    print(f"{name}: {len(blocks)} packages")


if __name__ == "__main__":
    sys.exit(main())
