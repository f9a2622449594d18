"""Which files nodes lack, what speaks against that, and how they get them."""

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
# Of files that rows name, looked for on nodes at a time.
_CHECKED = 20_000
_MAKE_ROOM = (
    "make room there, or name a larger disk (launcher: {ray: {runtime_env: {env_vars: {TMPDIR: ...}}}})"
)
# Takes what each node was asked; gives each answer as it comes, or why there is none.
Answers: TypeAlias = Callable[[Mapping[ClusterNode, Any]], Iterator[tuple[ClusterNode, Any, str]]]


@dataclass
class Supplied:
    """How nodes got their files: what some cannot have, and why some do not answer any more."""

    problems: dict[ClusterNode, list[str]] = field(default_factory=dict)
    silent: dict[ClusterNode, str] = field(default_factory=dict)

    def of(self, node: ClusterNode) -> list[str]:
        return [*self.problems.get(node, ()), *([self.silent[node]] if node in self.silent else ())]

    def well(self, nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
        return [node for node in nodes if node not in self.silent and node not in self.problems]

    def heard(self, answers: Iterable[tuple[ClusterNode, Any, str]]) -> Iterator[tuple[ClusterNode, Any]]:
        for node, answer, why in answers:
            if why:
                self.silent[node] = why
            else:
                yield node, answer

    def take(self, answers: Iterable[tuple[ClusterNode, Any, str]]) -> None:
        """What nodes answer to files that they get."""
        for node, problem in self.heard(answers):
            if problem and node not in self.problems:
                self.problems[node] = [f"{node.label}: {problem}; {_MAKE_ROOM}"]


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
        """Look at the files of these members, and no others from now on.

        Raises:
            CheckpointError: one cannot be read.
        """
        self.members = members
        try:
            self._copies = {name: copies_of(_files_of(one)) for name, one in members.items()}
            common = [one.spec.common for one in members.values()]
            self._tables = copies_of(path for one in common for path in (one.table_path, one.order_path))
        except OSError as error:
            raise CheckpointError(unreadable(error.filename or "", error)) from error

    def lacking(self, nodes: Sequence[ClusterNode], supplied: Supplied) -> dict[ClusterNode, dict[str, str]]:
        """What speaks against members on nodes that cannot have something of the hub, by their names."""
        wanted = sorted({one for files in self.hub_files.values() for one in files}, key=repr)
        asked = {node: node.call_files("lacks", wanted) for node in nodes if wanted}
        return {
            node: {
                name: f"{name}: {one.folder} is not in the hub's cache on {node.label}, and does not come from the "
                f"hub there ({lacks[one]}); run hf download {one.folder} there, or name a folder"
                for name, files in self.hub_files.items()
                for one in files
                if one in lacks
            }
            for node, lacks in supplied.heard(self._answers(asked))
        }

    def unfit(
        self, copies: Mapping[str, Copy], nodes: Sequence[ClusterNode], supplied: Supplied
    ) -> dict[ClusterNode, dict[str, str]]:
        """Which of these files nodes have not as they are here."""
        found: dict[ClusterNode, dict[str, str]] = {node: {} for node in nodes}
        for start in range(0, len(copies), _CHECKED):
            some, asked = dict(islice(copies.items(), start, start + _CHECKED)), dict[ClusterNode, Any]()
            reference = ray.put(some)
            for node in supplied.well(nodes):
                if some.items() <= node.known.keys():
                    found[node] |= {
                        path: what for path, copy in some.items() if (what := node.known[path, copy])
                    }
                else:
                    asked[node] = node.call_files("check", reference)
            for node, unfit in supplied.heard(self._answers(asked)):
                found[node] |= unfit
        return {node: found[node] for node in supplied.well(nodes)}

    def give(self, nodes: Sequence[ClusterNode], is_late: bool = False) -> Supplied:
        """Give nodes all that their workers will read, side by side.

        Args:
            is_late: some may go without; else nothing is sent where one cannot have all.
        """
        supplied, wanted = Supplied(), dict[str, list[ClusterNode]]()
        wanted |= {path: [*nodes] for path in self._tables}
        whole = dict(self._tables)
        for name, copies in self._copies.items():
            found = self.unfit(copies, supplied.well(nodes), supplied)
            for node in supplied.well(found):
                if problem := self.problem(name, node, found[node]):
                    supplied.problems.setdefault(node, []).append(problem)
                elif missing := found[node]:
                    node.own_copies.add(name)
                    for path in missing:
                        if node not in wanted.setdefault(path, []):
                            wanted[path].append(node)
                    whole |= {path: copies[path] for path in missing}
                    if there := [path for path in copies if path not in missing]:
                        supplied.take(self._answers({node: node.call_files("link", there)}))
        for node in nodes:
            size = sum(whole[path].size for path, takers in wanted.items() if node in takers)
            free = node.facts.free_disk_bytes
            if free is not None and size > free:
                supplied.problems.setdefault(node, []).append(
                    f"{node.label}: {gib(size)} of files are to go to {node.facts.folder}, where {gib(free)} are "
                    f"free; {_MAKE_ROOM}"
                )
        if is_late or not supplied.problems:
            self._ship(whole, wanted, supplied)
        return supplied

    def problem(self, name: str, node: ClusterNode, found: Mapping[str, str]) -> str:
        """What speaks against a member on a node that has not all of its files as they are here."""
        first: dict[str, str] = {}
        for path, what in found.items():
            first.setdefault(what, path)
        if path := first.get("another", ""):
            return (
                f"{name}: {path} on {node.label} is not the file that is here; copy it again, or remove it there "
                "and set launcher: {ray: {ship_models: true}}"
            )
        if path := first.get("unreadable", ""):
            return f"{name}: {path} on {node.label} cannot be read; allow it there"
        if not (path := first.get("missing", "")):
            return ""
        if not self.ships_models:
            return (
                f"{name}: {path} is not on {node.label}; copy the folder to the same path there, or set launcher: "
                "{ray: {ship_models: true}}"
            )
        member = self.members[name]
        folders = [Path(source).absolute() for source in (*member.sources, member.row_folder) if source]
        for path in found:
            if not any(Path(path).is_relative_to(folder) for folder in folders):
                return (
                    f"{name}: {path}, which a row names, is not on {node.label}, and ship_models sends only files "
                    f"below {member.row_folder}; let the rows name them relative to it"
                )
        return ""

    def _ship(
        self, copies: Mapping[str, Copy], wanted: Mapping[str, Sequence[ClusterNode]], supplied: Supplied
    ) -> None:
        """Send files to the nodes that want them: what several want goes into the object store once."""
        groups: dict[tuple[ClusterNode, ...], dict[str, Copy]] = {}
        for path, nodes in wanted.items():
            groups.setdefault(tuple(nodes), {})[path] = copies[path]
        under_way: deque[dict[ClusterNode, Any]] = deque()

        try:
            for nodes, files in groups.items():
                for pack in packs(files, _PACK_BYTES):
                    reference = ray.put(pack)
                    under_way.append(
                        {one: one.call_files("write", reference) for one in supplied.well(nodes)}
                    )
                    del reference  # it is freed when the last of them has it
                    if len(under_way) >= _PACKS_AHEAD:
                        supplied.take(self._answers(under_way.popleft()))
        except OSError as error:
            raise CheckpointError(f"a file changed while it was sent to nodes: {error}") from error
        while under_way:
            supplied.take(self._answers(under_way.popleft()))


def _files_of(member: MemberFiles) -> Iterator[str]:
    for source in member.sources:
        yield from map(str, files_of(source))
    yield from member.row_files()


def paths_of(member: MemberFiles, root: str) -> dict[str, str]:
    """What a member's texts become that are paths of this machine, on a node.

    Args:
        root: the folder there that stands for this machine's; empty: the same paths.
    """
    names = [str(file) for source in member.sources for file in files_of(source)]
    names += [source for source in member.sources if Path(source).exists()]
    paths = {member.row_folder: root + os.path.abspath(member.row_folder)} if member.row_folder else {}  # noqa: PTH100
    for name in names:
        absolute = os.path.abspath(name)  # noqa: PTH100  also without ".."
        paths |= dict.fromkeys((name, absolute, os.path.relpath(absolute)), root + absolute)
    return paths


def import_folders(member: MemberFiles, root: str) -> list[str]:
    """Of the folders that PYTHONPATH names here, those that hold a member's files; on a node."""
    files = [Path(source).absolute() for source in member.sources if Path(source).is_file()]
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [os.path.abspath(folder) for folder in named if folder]  # noqa: PTH100
    return [root + one for one in folders if any(file.is_relative_to(one) for file in files)]
