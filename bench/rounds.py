"""The measuring: every contestant once a round, all of them in turn, so that a slow hour slows everybody."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

from bench.agreement import Disagreement, check
from bench.contests import OURS, TUNED, Ground, Sample, Target, Work
from bench.processes import Failed

MIB = 1 << 20


@dataclass
class Found:
    """What rounds have brought so far.

    Attributes:
        samples: by work and contestant, then by round.
        problems: by work and contestant, what went wrong; nothing of theirs counts.
        apart: by work, how far contestants' probabilities were from this project's, at most.
    """

    samples: dict[tuple[str, str], dict[int, Sample]] = field(default_factory=dict)
    problems: dict[tuple[str, str], str] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)

    def pairs(self, target: Target) -> list[tuple[Sample, Sample]]:
        """This project's and the other's samples, of the rounds that have both."""
        ours = self.samples.get((target.work, target.ours), {})
        theirs = self.samples.get((target.work, target.against), {})
        return [(ours[each], theirs[each]) for each in sorted(ours.keys() & theirs.keys())]

    def problem(self, target: Target) -> str:
        """What is wrong with a target's row; empty where nothing is."""
        found = (self.problems.get((target.work, who), "") for who in (target.ours, target.against))
        return next(filter(None, found), "")


def say(text: str) -> None:
    """A line for who waits."""
    print(text, file=sys.stderr, flush=True)


def hold_rounds(
    ground: Ground,
    works: Sequence[Work],
    chosen: Mapping[str, Sequence[str]],
    repeats: int,
    found: Found,
    at_once: int = 1,
) -> None:
    """Run everybody ``repeats`` times, and put it into ``found`` as it comes.

    Args:
        chosen: by work, the contestants beside this project.
        at_once: works that run side by side; more than one says nothing about speed.
    """
    over = Event()

    def hold(work: Work, number: int) -> None:
        for contestant in (OURS, *chosen[work.name]):
            if (work.name, contestant) not in found.problems and not over.is_set():
                _run(ground, work, contestant, number, repeats, found)
        _compare(ground, work, chosen[work.name], number, found)

    for number in range(repeats):
        if at_once == 1:
            for work in works:
                hold(work, number)
            continue
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for waiting in [pool.submit(hold, work, number) for work in works]:
                    waiting.result()
            except BaseException:  # Ctrl-C reaches only this thread, and the processes
                over.set()
                raise


def _run(ground: Ground, work: Work, contestant: str, number: int, repeats: int, found: Found) -> None:
    who = f"round {number + 1} of {repeats}, {work.name}: {contestant}"
    say(f"[{time.strftime('%H:%M:%S')}] {who} ...")
    try:
        sample = ground.run(work, contestant)
    except Failed as error:
        found.problems[work.name, contestant] = str(error)
        say(f"{who} FAILED: {error}")
        return
    found.samples.setdefault((work.name, contestant), {})[number] = sample
    measured = sample.measured
    say(f"           {who}: {measured.seconds:.1f} s, {measured.peak_bytes / MIB:,.0f} MiB")


def _compare(ground: Ground, work: Work, contestants: Sequence[str], number: int, found: Found) -> None:
    ours = found.samples.get((work.name, OURS), {}).get(number)
    if ours is None:
        return
    tokens = sum(member["counters"]["tokens"] for member in ours.report["members"])
    for contestant in contestants:
        if number not in found.samples.get((work.name, contestant), {}):
            continue
        try:
            apart = check(ground, work, contestant, tokens)
        except (Disagreement, Failed) as error:
            found.problems[work.name, contestant] = str(error)
            say(f"round {number + 1}, {work.name}: DISAGREEMENT: {error}")
        else:
            if contestant != TUNED:
                found.apart[work.name] = max(apart, found.apart.get(work.name, 0.0))
