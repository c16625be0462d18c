"""What the command line prints about the lineage of an artifact."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from eagle3_core.config import resolve_path
from eagle3_core.lineage import Lineage, LineageNode, Making, find_artifact, to_dot, trace
from eagle3_core.report.figures import format_bytes, format_number_of
from eagle3_core.store.local import LocalStore

STATE_REMARK = {
    "missing": "is not in the store any more: what it was made from is not known",
    "in trash": "is in the trash: `eagle3 gc --restore {id}` puts it back",
    "unreadable": "cannot be read",
}


def show_lineage(store: LocalStore, workspace: str, name: str, as_json: bool, as_dot: bool) -> None:
    """Print an artifact and everything that it was made from."""
    lineage = trace(store, find_artifact(store, name), resolve_path(workspace))
    if as_json:
        print(lineage.model_dump_json(indent=1))
    elif as_dot:
        print(to_dot(lineage), end="")
    else:
        tree = Tree(_label(lineage.node(lineage.artifact)))
        Console().print(_branch(lineage, lineage.artifact, tree, {lineage.artifact}))


def _branch(lineage: Lineage, name: str, tree: Tree, shown: set[str]) -> Tree:
    """The parents below `tree`; an ancestor that two children share is spelled out once."""
    for role, parent in lineage.parents(name).items():
        if parent.id in shown:
            tree.add(f"[dim]{role}[/] [bold]{parent.id}[/] as above")
            continue
        shown.add(parent.id)
        _branch(lineage, parent.id, tree.add(f"[dim]{role}[/] {_label(parent)}"), shown)
    return tree


def _label(node: LineageNode) -> str:
    head = f"[bold]{node.id}[/]"
    if node.state == "outside":
        lines = [f"{head} {escape(node.name or 'of unknown name')}, {node.hash}"]
    elif node.state in ("complete", "partial"):
        lines = [
            f"{head} {node.state}, {format_number_of(node.num_files, 'file')}, {format_bytes(node.bytes)}"
        ]
    else:
        lines = [f"{head} [yellow]{STATE_REMARK[node.state].format(id=node.id)}[/]"]
    if node.problem:
        lines.append(escape(node.problem))
    if node.making:
        lines += _making(node.making)
    lines += [f"{key}: {_plain(value)}" for key, value in sorted(node.identity.items())]
    return "\n".join(lines)


def _making(made: Making) -> list[str]:
    run = f" by the run {made.run_id}" if made.run_id else ""
    code = f" with the code {made.git_commit}" if made.git_commit else ""
    packages = ", ".join(f"{name} {version}" for name, version in sorted(made.packages.items()))
    lines = [
        f"[dim]made {made.created_at} on {escape(made.host)}{escape(run)}{escape(code)}[/]",
        f"[dim]in Python {escape(made.python)}{escape(f', {packages}' if packages else '')}[/]",
    ]
    if made.run_config:
        lines.append(f"[dim]configured by {escape(made.run_config)}[/]")
    return lines


def _plain(value: Any) -> str:
    return escape(value if isinstance(value, str) else json.dumps(value))
