"""Find which files nodes lack and why members cannot run there, and send files to nodes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ensemble.common.errors import CheckpointError
from ensemble.common.files import HubFile, unreadable
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import MemberFiles
from ensemble.scheduling.launchers.ray.cluster import ray
from ensemble.scheduling.launchers.ray.copies import Copy, copies_of, files_of, packs
from ensemble.scheduling.launchers.ray.nodes import ClusterNode

# Files go to nodes in packs of this size.
_PACK_BYTES = 32 << 20
_MAKE_ROOM = (
    "make room there, or name a larger disk (launcher: {ray: {runtime_env: {env_vars: {TMPDIR: ...}}}})"
)
# Takes the reference of each node's answer; yields answers as they come.  Nodes that do not answer are lost.
Answers: TypeAlias = Callable[[Mapping[ClusterNode, Any]], Iterator[tuple[ClusterNode, Any]]]


class Supply:
    """Keep the list of the members' files, and send the files to nodes.

    Args:
        answers: waits for the answers of nodes.
        ships_models: whether nodes get models that they lack.
    """

    def __init__(self, answers: Answers, ships_models: bool) -> None:
        self._answers = answers
        self.ships_models = ships_models
        self.members: Mapping[str, MemberFiles] = {}
        self.hub_files: Mapping[str, Sequence[HubFile]] = {}
        self._copies: Mapping[str, Mapping[str, Copy]] = {}
        self._tables: Mapping[str, Copy] = {}

    def read(self, members: Mapping[str, MemberFiles]) -> None:
        """Read the files of these members, and forget others; raises CheckpointError if a file cannot be read."""
        self.members = members
        commons = [member.spec.common for member in members.values()]
        try:
            self._copies = {name: copies_of(_files_of(member)) for name, member in members.items()}
            self._tables = copies_of(
                path for common in commons for path in (common.table_path, common.order_path)
            )
        except OSError as error:
            raise CheckpointError(unreadable(error.filename or "", error)) from error

    def hub_problems(self, nodes: Sequence[ClusterNode]) -> dict[ClusterNode, dict[str, str]]:
        """Return by node and member why a member that needs the hub cannot run there."""
        problems: dict[ClusterNode, dict[str, str]] = {node: {} for node in nodes}
        hub_files = sorted({file for files in self.hub_files.values() for file in files}, key=repr)
        if not hub_files:
            return problems
        requests = {node: node.call("files", "missing_hub_files", hub_files) for node in nodes}
        for node, missing in self._answers(requests):
            for name, files in self.hub_files.items():
                for file in missing.keys() & set(files):
                    problems[node][name] = (
                        f"{name}: {file.folder} is not in the hub's cache on {node.label}, and does not come "
                        f"from the hub there ({missing[file]}); run hf download {file.folder} there, or name "
                        "a folder"
                    )
        return problems

    def unfit(
        self, copies: Mapping[str, Copy], nodes: Sequence[ClusterNode]
    ) -> dict[ClusterNode, dict[str, str]]:
        """Return by node which of these files are missing or others there (see ``Agent.check``)."""
        reference = ray.put(copies)
        requests = {node: node.call("files", "check", reference) for node in nodes if not node.why_lost}
        return dict(self._answers(requests))

    def deliver(self, nodes: Sequence[ClusterNode]) -> Mapping[ClusterNode, list[str]]:
        """Send nodes all that their workers will read, or return the problems of nodes that cannot have it."""
        problems: defaultdict[ClusterNode, list[str]] = defaultdict(list)
        copies = dict(self._tables)
        receivers: dict[str, list[ClusterNode]] = {path: list(nodes) for path in self._tables}
        for name, member_copies in self._copies.items():
            for node, reasons in self.unfit(member_copies, nodes).items():
                problem = self.problem(name, node, reasons)
                if problem:
                    problems[node].append(problem)
                elif reasons:
                    # All of its files, as they belong into one folder.
                    node.supplied_members.add(name)
                    copies |= member_copies
                    for path in member_copies:
                        if node not in receivers.setdefault(path, []):
                            receivers[path].append(node)
        for node in nodes:
            size = sum(copies[path].size for path, takers in receivers.items() if node in takers)
            free = node.facts.node.free_disk_bytes
            if free is not None and size > free:
                problems[node].append(
                    f"{node.label}: {gib(size)} of files are to go to {node.facts.folder}, where {gib(free)} are "
                    f"free; {_MAKE_ROOM}"
                )
        if not problems:
            self._ship(copies, receivers, problems)
        return problems

    def problem(self, name: str, node: ClusterNode, unfit: Mapping[str, str]) -> str:
        """Return why a member cannot run on a node that lacks these of its files; empty if it gets them."""
        for path, reason in unfit.items():
            if reason == "another":
                return (
                    f"{name}: {path} on {node.label} is not the file that is here, or cannot be read; copy it "
                    "again, or remove it there and set launcher: {ray: {ship_models: true}}"
                )
            if not self.ships_models:
                return (
                    f"{name}: {path} is not on {node.label}; copy the folder to the same path there, or "
                    "set launcher: {ray: {ship_models: true}}"
                )
        return ""

    def _ship(
        self,
        copies: Mapping[str, Copy],
        receivers: Mapping[str, Sequence[ClusterNode]],
        problems: dict[ClusterNode, list[str]],
    ) -> None:
        """Send files to nodes; a file for several nodes goes into the object store once."""
        groups: dict[tuple[ClusterNode, ...], dict[str, Copy]] = {}
        for path, nodes in receivers.items():
            groups.setdefault(tuple(nodes), {})[path] = copies[path]
        try:
            for nodes, files in groups.items():
                for pack in packs(files, _PACK_BYTES):
                    reference = ray.put(pack)
                    takers = [node for node in nodes if not node.why_lost and node not in problems]
                    requests = {node: node.call("files", "write", reference) for node in takers}
                    for node, problem in self._answers(requests):
                        if problem:
                            problems[node] = [f"{node.label}: {problem}; {_MAKE_ROOM}"]
        except OSError as error:
            raise CheckpointError(f"a file changed while it was sent to nodes: {error}") from error


def _files_of(member: MemberFiles) -> Iterator[str]:
    for source in member.sources:
        yield from files_of(source)
    yield from member.row_files()


def paths_of(member: MemberFiles, root: str) -> dict[str, str]:
    """Return the texts of a member that are paths of this machine, with their paths below ``root`` on a node."""
    names = [file for source in member.sources for file in files_of(source)]
    names += [source for source in member.sources if Path(source).exists()]
    paths = {}
    if member.row_folder:
        paths[member.row_folder] = root + os.path.abspath(member.row_folder)  # noqa: PTH100
    for name in names:
        absolute = os.path.abspath(name)  # noqa: PTH100  also without ".."
        paths |= dict.fromkeys((name, absolute, os.path.relpath(absolute)), root + absolute)
    return paths


def import_folders(member: MemberFiles, root: str) -> list[str]:
    """Return the folders of this machine's PYTHONPATH that hold a member's files, by their paths on a node."""
    files = [Path(source).absolute() for source in member.sources if Path(source).is_file()]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [os.path.abspath(entry) for entry in entries if entry]  # noqa: PTH100
    return [root + folder for folder in folders if any(file.is_relative_to(folder) for file in files)]
