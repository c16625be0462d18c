"""A tree that one thread watches while another ends it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from eagle3_core.host import process_tree
from eagle3_core.host.process_tree import ProcessTree


def test_members_are_found_while_another_thread_remembers_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tree, is_alive = ProcessTree(process.pid, "a-token-of-this-test"), process_tree._is_alive

    def slowly(member: psutil.Process) -> bool:
        tree._known.setdefault(1, psutil.Process(1))
        return is_alive(member)

    monkeypatch.setattr(process_tree, "_is_alive", slowly)
    try:
        assert process.pid in {member.pid for member in tree.members()}
    finally:
        process.communicate(b"\n")
