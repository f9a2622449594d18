"""Which files nodes lack, why members cannot run there, and how nodes get files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from ensemble.common.errors import CheckpointError
from ensemble.common.files import HubFile, unreadable
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import MemberFiles
from ensemble.scheduling.launchers.ray.cluster import ray
from ensemble.scheduling.launchers.ray.copies import Copy, copies_of, files_of, packs
from ensemble.scheduling.launchers.ray.nodes import ClusterNode

# Files go to nodes in packs of this size, so many of them at the same time.
_PACK_BYTES = 16 << 20
_PACKS_AHEAD = 4
# How many files nodes check at a time: rows can name very many.
_CHECKED_AT_A_TIME = 20_000
_MAKE_ROOM = (
    "make room there, or name a larger disk (launcher: {ray: {runtime_env: {env_vars: {TMPDIR: ...}}}})"
)
# A node, its answer, and why there is none.
Answer: TypeAlias = tuple[ClusterNode, Any, str]
# Takes the reference of each node's answer; yields answers as they come.
Answers: TypeAlias = Callable[[Mapping[ClusterNode, Any]], Iterator[Answer]]


@dataclass
class Supplied:
    """How nodes got their files.

    Attributes:
        problems: why a node cannot have all of its files.
        silent: why a node does not answer any more.
    """

    problems: dict[ClusterNode, list[str]] = field(default_factory=dict)
    silent: dict[ClusterNode, str] = field(default_factory=dict)

    def add_problem(self, node: ClusterNode, problem: str) -> None:
        self.problems.setdefault(node, []).append(problem)

    def problems_of(self, node: ClusterNode) -> list[str]:
        problems = list(self.problems.get(node, ()))
        if node in self.silent:
            problems.append(self.silent[node])
        return problems

    def usable(self, nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
        """Return the nodes that answer and have no problem."""
        return [node for node in nodes if node not in self.silent and node not in self.problems]

    def answered(self, answers: Iterable[Answer]) -> Iterator[tuple[ClusterNode, Any]]:
        """Yield the answers; note nodes that do not answer."""
        for node, answer, why in answers:
            if why:
                self.silent[node] = why
            else:
                yield node, answer

    def note_written(self, answers: Iterable[Answer]) -> None:
        """Note the problems that nodes have with files that they were sent."""
        for node, problem in self.answered(answers):
            if problem and node not in self.problems:
                self.add_problem(node, f"{node.label}: {problem}; {_MAKE_ROOM}")


class Supply:
    """The files of a run's members.

    Args:
        answers: waits for what nodes answer.
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
        """Read the files of these members, which are the only ones from now on.

        Raises:
            CheckpointError: one cannot be read.
        """
        self.members = members
        tables = []
        for member in members.values():
            tables += [member.spec.common.table_path, member.spec.common.order_path]
        try:
            self._copies = {name: copies_of(_files_of(member)) for name, member in members.items()}
            self._tables = copies_of(tables)
        except OSError as error:
            raise CheckpointError(unreadable(error.filename or "", error)) from error

    def lacking(self, nodes: Sequence[ClusterNode], supplied: Supplied) -> dict[ClusterNode, dict[str, str]]:
        """Return by node why members cannot run there that need something of the hub, by their names."""
        hub_files = sorted({file for files in self.hub_files.values() for file in files}, key=repr)
        requests = {}
        if hub_files:
            requests = {node: node.call_files("missing_hub_files", hub_files) for node in nodes}
        problems: dict[ClusterNode, dict[str, str]] = {}
        for node, missing in supplied.answered(self._answers(requests)):
            problems[node] = {}
            for name, files in self.hub_files.items():
                for file in files:
                    if file in missing:
                        problems[node][name] = (
                            f"{name}: {file.folder} is not in the hub's cache on {node.label}, and does not come "
                            f"from the hub there ({missing[file]}); run hf download {file.folder} there, or name "
                            "a folder"
                        )
        return problems

    def unfit(
        self, copies: Mapping[str, Copy], nodes: Sequence[ClusterNode], supplied: Supplied
    ) -> dict[ClusterNode, dict[str, str]]:
        """Return by node which of these files it does not have as they are here, and why (see ``Agent.check``)."""
        unfit: dict[ClusterNode, dict[str, str]] = {node: {} for node in nodes}
        for start in range(0, len(copies), _CHECKED_AT_A_TIME):
            part = dict(islice(copies.items(), start, start + _CHECKED_AT_A_TIME))
            reference = ray.put(part)
            requests = {node: node.call_files("check", reference) for node in supplied.usable(nodes)}
            for node, reasons in supplied.answered(self._answers(requests)):
                unfit[node] |= reasons
        return {node: unfit[node] for node in supplied.usable(nodes)}

    def deliver(self, nodes: Sequence[ClusterNode], is_late: bool = False) -> Supplied:
        """Send nodes all that their workers will read, side by side.

        Args:
            is_late: some nodes may go without; else nothing is sent where one cannot have all.
        """
        supplied = Supplied()
        copies = dict(self._tables)
        receivers: dict[str, list[ClusterNode]] = {path: list(nodes) for path in self._tables}
        for name, member_copies in self._copies.items():
            unfit = self.unfit(member_copies, supplied.usable(nodes), supplied)
            for node in supplied.usable(unfit):
                missing = unfit[node]
                problem = self.problem(name, node, missing)
                if problem:
                    supplied.add_problem(node, problem)
                    continue
                if not missing:
                    continue
                node.supplied_members.add(name)
                for path in missing:
                    copies[path] = member_copies[path]
                    if node not in receivers.setdefault(path, []):
                        receivers[path].append(node)
                present = [path for path in member_copies if path not in missing]
                if present:
                    supplied.note_written(self._answers({node: node.call_files("link", present)}))
        for node in nodes:
            size = sum(copies[path].size for path, takers in receivers.items() if node in takers)
            free = node.facts.free_disk_bytes
            if free is not None and size > free:
                text = (
                    f"{node.label}: {gib(size)} of files are to go to {node.facts.folder}, where {gib(free)} are "
                    f"free; {_MAKE_ROOM}"
                )
                supplied.add_problem(node, text)
        if is_late or not supplied.problems:
            self._ship(copies, receivers, supplied)
        return supplied

    def problem(self, name: str, node: ClusterNode, unfit: Mapping[str, str]) -> str:
        """Return why a member cannot run on a node that lacks these of its files; empty if it gets them."""
        first: dict[str, str] = {}
        for path, reason in unfit.items():
            first.setdefault(reason, path)
        if "another" in first:
            return (
                f"{name}: {first['another']} on {node.label} is not the file that is here; copy it again, or "
                "remove it there and set launcher: {ray: {ship_models: true}}"
            )
        if "unreadable" in first:
            return f"{name}: {first['unreadable']} on {node.label} cannot be read; allow it there"
        if "missing" not in first:
            return ""
        if not self.ships_models:
            return (
                f"{name}: {first['missing']} is not on {node.label}; copy the folder to the same path there, or "
                "set launcher: {ray: {ship_models: true}}"
            )
        member = self.members[name]
        folders = [Path(source).absolute() for source in (*member.sources, member.row_folder) if source]
        for path in unfit:
            if not any(Path(path).is_relative_to(folder) for folder in folders):
                return (
                    f"{name}: {path}, which a row names, is not on {node.label}, and ship_models sends only files "
                    f"below {member.row_folder}; let the rows name them relative to it"
                )
        return ""

    def _ship(
        self,
        copies: Mapping[str, Copy],
        receivers: Mapping[str, Sequence[ClusterNode]],
        supplied: Supplied,
    ) -> None:
        """Send files to nodes; a file for several nodes goes into the object store once."""
        groups: dict[tuple[ClusterNode, ...], dict[str, Copy]] = {}
        for path, nodes in receivers.items():
            groups.setdefault(tuple(nodes), {})[path] = copies[path]
        under_way: deque[dict[ClusterNode, Any]] = deque()

        try:
            for nodes, files in groups.items():
                for pack in packs(files, _PACK_BYTES):
                    reference = ray.put(pack)
                    under_way.append(
                        {node: node.call_files("write", reference) for node in supplied.usable(nodes)}
                    )
                    del reference  # it is freed when the last of them has it
                    if len(under_way) >= _PACKS_AHEAD:
                        supplied.note_written(self._answers(under_way.popleft()))
        except OSError as error:
            raise CheckpointError(f"a file changed while it was sent to nodes: {error}") from error
        while under_way:
            supplied.note_written(self._answers(under_way.popleft()))


def _files_of(member: MemberFiles) -> Iterator[str]:
    for source in member.sources:
        yield from map(str, files_of(source))
    yield from member.row_files()


def paths_of(member: MemberFiles, root: str) -> dict[str, str]:
    """Return the texts of a member that are paths of this machine, with their paths on a node.

    Args:
        root: the folder on the node that stands for this machine's root; empty: the paths are the same.
    """
    names = [str(file) for source in member.sources for file in files_of(source)]
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
