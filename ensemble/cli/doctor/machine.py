"""What there is to be found, and every check but those of GPUs: Python, packages, memory, CPUs, disk, the hub."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ensemble.cli.layout import NO_BREAK, Page
from ensemble.common.files import cannot_write, unwritable_reason
from ensemble.common.host import available_memory_bytes, own_groups, total_memory_bytes
from ensemble.common.packages import OLDEST_PYTHON, Requirement
from ensemble.common.text import gib
from ensemble.members.huggingface.checkpoint.hub import hub_can_be_reached

_WIDTH = 100  # at most: longer lines read badly
_INDENT = " " * 9
# Importing torch and transformers takes a worker to 0.4 GiB before it has a model.
_MEMORY_NEEDED = 512 << 20
_MEMORY_WANTED = 2 << 30
_DISK_NEEDED = 50 << 20
_DISK_WANTED = 1 << 30
# Docker gives 64 MiB unless it is told otherwise.
_SHARED_WANTED = 64 << 20
_ELSEWHERE = "choose another directory, or make room there"

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """``text`` is what was found, ``advice`` what to do; with a problem no run can start."""

    mark: Mark
    text: str
    advice: str = ""

    @classmethod
    def of_sentence(cls, mark: Mark, sentence: str, otherwise: str) -> Finding:
        """A finding from one of this package's sentences, most of which end with what to do after a semicolon.

        Args:
            otherwise: the advice where the sentence has none.
        """
        text, _, advice = sentence.rpartition("; ")
        return cls(mark, text, advice) if text else cls(mark, sentence, otherwise)

    def lines(self, page: Page) -> list[str]:
        """As it is printed: at most 100 columns, the advice on lines of its own."""
        page = replace(page, width=min(page.width or _WIDTH, _WIDTH))
        shown = page.wrapped(self.text, f"{self.mark:<{len(_INDENT)}}")
        return [*shown, *page.wrapped(self.advice, f"{_INDENT}-> ")] if self.advice else shown


def python_finding(version: tuple[int, int], shown: str) -> Finding:
    """Whether this Python is new enough.

    Args:
        version: major and minor.
        shown: the version in full.
    """
    if version >= OLDEST_PYTHON:
        return Finding("ok", f"Python {shown} ({sys.executable}), {platform.platform(terse=True)}")
    oldest = ".".join(map(str, OLDEST_PYTHON))
    advice = f"use Python {oldest} or newer, in an environment of its own"
    return Finding("problem", f"Python {shown} is too old", advice)


def package_findings(
    requirements: Iterable[Requirement], installed: Mapping[str, str], needed: Mapping[str, str]
) -> Iterator[Finding]:
    """What is missing or too old, and the versions of the rest.

    Args:
        requirements: what this package asks for.
        installed: version by name of those that are there.
        needed: packages of extras that the config needs, and which key needs them; ``validate`` misses those
            that are not there.
    """
    good = []
    for requirement in requirements:
        name, version = requirement.name, installed.get(requirement.name)
        is_needed = not requirement.extra or name in needed
        why = f", which {needed[name]} needs" if name in needed else ""
        if version is None and not requirement.extra:
            yield Finding("problem", f"{name} is not installed", requirement.install)
        elif version is not None and (wrong := requirement.wrong(version)):
            text = f"{name} {version} is {wrong}{why}"
            yield Finding("problem" if is_needed else "note", text, requirement.install)
        elif version is not None:
            good.append(f"{name}{NO_BREAK}{version}")
    if good:
        yield Finding("ok", ", ".join(good))


def memory_findings(available: int | None, total: int | None, shared: int | None) -> Iterator[Finding]:
    """Memory of the host, within the limits of the container.

    Args:
        available: bytes that can be used, None where it is not known; ``total`` alike.
        shared: bytes free in /dev/shm, None where there is none.
    """
    if available is None or total is None:
        yield Finding("note", "the system does not say how much memory is free", "watch it in the first run")
    else:
        text, advice = (
            f"{gib(available)} of {gib(total)} memory free",
            "end other programs or raise the container's limit; ",
        )
        if available < _MEMORY_NEEDED:
            yield Finding("problem", text, advice + "a worker needs more")
        elif available < _MEMORY_WANTED:
            yield Finding("note", text, advice + "only small models fit")
        else:
            yield Finding("ok", text)
    if shared is None:
        yield Finding("note", "there is no /dev/shm", "mount it if a library asks for shared memory")
    elif shared < _SHARED_WANTED:
        advice = "if a library asks for more, start the container with --shm-size=1g or --ipc=host"
        yield Finding("note", f"{gib(shared)} of shared memory free in /dev/shm", advice)
    else:
        yield Finding("ok", f"{gib(shared)} of shared memory free in /dev/shm")


def host_findings() -> Iterator[Finding]:
    """Memory and CPUs of this host as it is now."""
    shm = Path("/dev/shm")
    shared = shutil.disk_usage(shm).free if shm.is_dir() else None
    yield from memory_findings(available_memory_bytes(), total_memory_bytes(), shared)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield cpu_finding(allowed, os.cpu_count() or allowed, own_groups("cpu").cpu_limit())


def cpu_finding(allowed: int, there: int, limit: float | None) -> Finding:
    """CPUs that this process may use.

    Args:
        allowed: those it may run on.
        there: those the machine has.
        limit: how many CPUs' time its container gets, None for no limit.
    """
    text = f"{allowed} of {there} CPUs may be used"
    if limit is None or limit >= allowed:
        return Finding("ok", text)
    text += f", and the container's limit is the time of {limit:g}"
    # torch starts a thread for each CPU it sees; they then wait for one another.
    return Finding("note", text, f"set OMP_NUM_THREADS={max(1, int(limit))}, or raise the limit")


def disk_findings(key: str, place: Path) -> Iterator[Finding]:
    """Whether a directory can be made and written, and how much room there is.

    Args:
        key: what the place is called in messages, such as "output_dir".
        place: need not exist; nothing is left there.
    """
    reason = unwritable_reason(key, place)
    folder = place.absolute()
    while not folder.exists():
        folder = folder.parent
    if reason is None:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:  # such as a quota, which no question about rights shows
            reason = cannot_write(key, place, error)
    if reason is not None:
        yield Finding.of_sentence("problem", reason, _ELSEWHERE)
    else:
        yield room_finding(key, place, shutil.disk_usage(folder).free)


def room_finding(key: str, place: Path, free: int) -> Finding:
    """Whether ``free`` bytes on the disk of ``place`` are enough."""
    text = f"{key}: {gib(free)} free at {place.absolute()}"
    if free < _DISK_NEEDED:
        return Finding("problem", text, _ELSEWHERE)
    if free < _DISK_WANTED:
        return Finding("note", text, "make room: the results and a copy of the table go there")
    return Finding("ok", text)


def hub_findings() -> Iterator[Finding]:
    """Whether the hub answers, and whether it will be asked with a token."""
    from huggingface_hub import constants, get_token

    host = urlsplit(constants.ENDPOINT).hostname or "its address"
    if hub_can_be_reached():
        token = (
            "with a token" if get_token() else "without a token: gated models, such as Gemma, need HF_TOKEN"
        )
        yield Finding("ok", f"the Hugging Face hub can be reached ({host}), {token}")
    else:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no connection to {host}"
        advice = "name models by folders; what is in the hub's cache works too"
        yield Finding("note", f"the Hugging Face hub cannot be reached ({why})", advice)
