"""How many threads and workers a run chose for each member on a CPU, kept in the member's work folder.

A resumed run takes the choice over, as another number of threads can change last digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from ensemble.common.files import read_json, write_text
from ensemble.common.shards import cpu_choice_path
from ensemble.common.text import plural
from ensemble.pipeline.resume import MemberWork
from ensemble.planning.plan import CpuChoice, MemberPlan, Plan
from ensemble.scheduling.launchers.local import worker_threads


def kept_cpu_choices(works: Mapping[str, MemberWork]) -> dict[str, CpuChoice]:
    """Return what earlier runs chose for members that are not complete, by name."""
    choices = {}
    for name, work in works.items():
        choice = None if work.is_complete else _read(work.shards_dir)
        if choice is not None:
            choices[name] = choice
    return choices


def keep_cpu_choice(shards_dir: Path, member: MemberPlan) -> None:
    """Write what this run chose for a member, unless an earlier run chose the same threads.

    Raises:
        WriteError: the disk is full or the like.
    """
    threads = member.cpu_threads or worker_threads(member.cpu_share)
    choice = CpuChoice(threads=threads, workers=member.replicas)
    kept = _read(shards_dir)
    if kept is None or kept.threads != threads:
        write_text(cpu_choice_path(shards_dir), json.dumps(asdict(choice)) + "\n")


def changed_cpu_choices(plan: Plan, kept: Mapping[str, CpuChoice]) -> Iterator[str]:
    """Yield a sentence for each member that does not run on the CPU as it began."""
    for member in plan.members:
        choice = kept.get(member.name)
        if choice is None or member.gpus:
            continue
        threads = member.cpu_threads or worker_threads(member.cpu_share)
        if threads != choice.threads:
            why = f"the run may use {plural(plan.cpus, 'core')}"
            if plan.config.cpu_workers != "auto":
                why = f"cpu_workers is {plan.config.cpu_workers}"
            elif member.request.replicas != "auto":
                why = f"replicas is {member.request.replicas}"
            yield (
                f"{member.name}: its workers began with {plural(choice.threads, 'thread')} each and go on with "
                f"{threads}, as {why}: last digits of its rows may differ"
            )
        elif member.replicas < min(choice.workers, len(member.chunks)):
            yield (
                f"{member.name}: {plural(member.replicas, 'worker')} at a time instead of {choice.workers}, as "
                "cores and free memory hold no more; its numbers stay the same"
            )


def _read(shards_dir: Path) -> CpuChoice | None:
    """Return the choice in a member's work folder; None if there is none, or the file is damaged."""
    document = read_json(cpu_choice_path(shards_dir))
    threads, workers = document.get("threads"), document.get("workers")
    if not isinstance(threads, int) or not isinstance(workers, int) or min(threads, workers) < 1:
        return None
    return CpuChoice(threads=threads, workers=workers)
