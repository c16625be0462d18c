"""Stands for an engine's process: answers at once, but fails or never answers where its files say so.

Its answers stand behind what an engine's own process has begun to write into the same line.

`odd_worker SPEC MODE`: SPEC lies in a folder below that of the target, whose part and way say how it goes.
"""

from __future__ import annotations

import json
import os
import sys
import time

IMPORTED_IN = os.getpid()
PREFIX = "@capture-benchmark "
FACTS = {"engine": "odd 1.0", "device": "none", "import_seconds": 1.0, "import_cpu_seconds": 1.0}


def main(spec: str, mode: str) -> None:
    """Answer commands until standard input ends."""
    is_in = {name: f"/{name}/" in spec for name in ("mla", "tensor_parallel")}
    for line in sys.stdin:
        if line.startswith("load") and all(is_in.values()):
            time.sleep(600)
        if line.startswith("load") and is_in["mla"]:
            sys.exit("no memory is left on the GPU")
        if line.startswith("round 1") and is_in["tensor_parallel"] and mode == "capture":
            sys.exit("the engine is dead")
        if line.startswith("load"):
            variables = [os.environ.get(name) for name in ("ODD_COMMON", "ODD_OWN")]
            answer = {"event": "loaded", "load_seconds": 1.0, **FACTS, "variables": variables}
            answer |= {"pid": os.getpid(), "imported_in": IMPORTED_IN}
        else:
            answer = {"event": "done", "began": 5.0, "seconds": 1.0, "tokens": 100}
            answer |= {"stored_bytes": 10, "last_token_seconds": 0.9}
        print(f"(EngineCore pid=7) {PREFIX}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
