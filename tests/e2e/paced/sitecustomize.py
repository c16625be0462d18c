"""Slows a step down, so that a test that kills it comes in time; this folder is on `PYTHONPATH` for that.

Shards and optimizer steps of the tiny target take some ten milliseconds: all could be over before a test that
waits for the second one looks again. `EAGLE3_TEST_PACED` names the step; each of its shards or optimizer
steps but the first waits for `SECONDS` before it begins.
"""

import functools
import importlib
import os
import time

SECONDS = 2.0
PACED = {
    "extract": ("eagle3_core.capture.extract", "eagle3_core.capture.pool", "EnginePool", "take"),
    "train": ("eagle3_core.training.train", "eagle3_core.training.loop", "Trainer", "_step"),
}
"""The module of a step, and the method that begins a shard or an optimizer step."""

usual_import = importlib.import_module


def import_module(name, package=None):
    module = usual_import(name, package)
    step, place, owner, method = PACED[os.environ["EAGLE3_TEST_PACED"]]
    if name == step:
        pace(getattr(usual_import(place), owner), method)
    return module


def pace(owner, method):
    usual, begun = getattr(owner, method), []

    @functools.wraps(usual)
    def paced(*arguments):
        if begun:
            time.sleep(SECONDS)
        begun.append(True)
        return usual(*arguments)

    setattr(owner, method, paced)


if "EAGLE3_TEST_PACED" in os.environ:
    importlib.import_module = import_module
