"""What a run chose of the CPU for each member, kept in the member's work folder: a resumed run is the same run.

Products of other sizes, as other numbers of threads compute them, can differ in their last digits.
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
from ensemble.scheduling.launchers.threads import worker_threads


def kept_cpu_choices(works: Mapping[str, MemberWork]) -> dict[str, CpuChoice]:
    """Return what earlier runs chose for members that are not complete, by name."""
    choices = {name: _read(work.shards_dir) for name, work in works.items() if not work.is_complete}
    return {name: choice for name, choice in choices.items() if choice is not None}


def keep_cpu_choice(shards_dir: Path, member: MemberPlan) -> None:
    """Write down what this run chose for a member, if its rows so far were not computed in the same way.

    Raises:
        WriteError: the disk is full or the like.
    """
    choice = CpuChoice(member.cpu_threads or worker_threads(member.cpu_share), member.replicas)
    kept = _read(shards_dir)
    if kept is None or kept.threads != choice.threads:
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
    kept = read_json(cpu_choice_path(shards_dir))
    numbers = [kept.get("threads"), kept.get("workers")]
    threads, workers = (number if isinstance(number, int) and number > 0 else 0 for number in numbers)
    return CpuChoice(threads, workers) if threads and workers else None
