"""Checks the figures of the newest run in a workspace against what the demo promises; one line each.

Usage: check_demo.py WORKSPACE [--reused]. With --reused, every artifact must have been there already.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MIN_ACCEPTANCE_LENGTH = 1.4
NUM_SPECULATIVE_TOKENS = 3
MAX_RATIO_ERROR = 0.15
MAX_FIRST_DIFFERENCE = 0.07
LOSSLESS = ("identical", "ties")
MAKING_STAGES = {"prepare", "extract", "verify", "train", "export", "benchmark"}


def checks(summary: dict[str, Any], reused: bool) -> dict[str, bool]:
    """Every promise with whether it is kept; the key says what was found."""
    bench, agreement, training = summary["benchmark"], summary["agreement"], summary["training"]
    if bench is None or agreement is None or training is None:
        return {f"the run is {summary['state']} without a measurement: {summary['message']}": False}
    figures = {"acceptance length": bench["acceptance_length"], "K": bench["num_speculative_tokens"]}
    ratio, first = agreement["accepted_ratio"] or 0.0, agreement["first_position_difference"]
    made = {stage["stage"] for stage in summary["stages"] if not stage["reused"]} & MAKING_STAGES
    return {
        f"the run is {summary['state']}": summary["state"] == "completed",
        f"{figures} with at least {MIN_ACCEPTANCE_LENGTH} at K={NUM_SPECULATIVE_TOKENS}": (
            bench["acceptance_length"] > MIN_ACCEPTANCE_LENGTH
            and bench["num_speculative_tokens"] == NUM_SPECULATIVE_TOKENS
        ),
        f"outputs with and without the draft: {bench['lossless']}": bench["lossless"] in LOSSLESS,
        f"accepted drafts per pass, trainer over vLLM: {ratio:.3f}": abs(ratio - 1) <= MAX_RATIO_ERROR,
        f"first-position rate, trainer minus vLLM: {first:+.3f}": abs(first) <= MAX_FIRST_DIFFERENCE,
        f"the estimate rose over {len(training['epochs'])} epochs": (
            training["epochs"][-1]["heldout"]["acceptance_length"]
            > training["epochs"][0]["heldout"]["acceptance_length"]
        ),
        f"made in this run: {', '.join(sorted(made)) or 'nothing'}": not (reused and made),
    }


def main() -> int:
    """Print each check; returns 0 only if all hold."""
    workspace, *options = sys.argv[1:]
    newest = max(path for path in (Path(workspace) / "runs").iterdir() if (path / "summary.json").is_file())
    if not (newest / "report.html").is_file():
        print(f"{newest} has no report.html")
        return 1
    summary = json.loads((newest / "summary.json").read_text())
    results = checks(summary, reused="--reused" in options)
    print(f"    {summary['seconds']:.0f} s in all")
    for claim, holds in results.items():
        print(f"{'ok ' if holds else 'BAD'} {claim}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
