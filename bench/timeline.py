"""PURE: where this project's time went, from its run.json: what explains a ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.contests import OURS, Sample, Work
from bench.rounds import Found


def timeline(works: Sequence[Work], found: Found) -> list[dict[str, object]]:
    """A row for each worker of the median run on each work; all values in seconds unless they say otherwise."""
    rows: list[dict[str, object]] = []
    for work in works:
        if samples := _sorted(work, found):
            middle = samples[len(samples) // 2]
            rows += _workers(work.name, middle.measured.seconds, middle.report)
    return rows


def phases(works: Sequence[Work], found: Found) -> list[str]:
    """What is beside the workers in each work's median run: the parent's own time, and devices that wait."""
    lines = []
    for work in works:
        if samples := _sorted(work, found):
            middle = samples[len(samples) // 2]
            workers = [worker for member in middle.report["members"] for worker in member["workers"]]
            ends = (worker["leased_after_seconds"] + (worker["life_seconds"] or 0.0) for worker in workers)
            alone = middle.measured.seconds - max(ends)
            gaps = [gap["seconds"] for gap in middle.report.get("idle_gaps", ())]
            shown = ", ".join(f"{gap:.2f}" for gap in gaps) or "none"
            lines.append(
                f"- {work.name}: {alone:.2f} s before the first worker and after the last one; seconds in which "
                f"nothing computed between two members: {shown}"
            )
    return lines


def _sorted(work: Work, found: Found) -> list[Sample]:
    samples = found.samples.get((work.name, OURS), {}).values()
    return sorted(samples, key=lambda sample: sample.measured.seconds)


def _workers(work: str, seconds: float, report: Any) -> Iterator[dict[str, object]]:
    for member in report["members"]:
        tokens, padded = member["counters"]["tokens"], member["counters"]["padded_tokens"]
        for worker in member["workers"]:
            predict, forward = worker["counters"]["predict_seconds"], worker["counters"]["forward_seconds"]
            life = worker["life_seconds"] or 0.0
            yield {
                "work": work,
                "whole run": seconds,
                "member": member["name"],
                "process started at": worker["started_after_seconds"],
                "imports": worker["start_seconds"],
                "load": worker["load_seconds"],
                "predict": predict,
                "of it in forward passes": forward,
                "life": life,
                "forward / life": forward / life if life else None,
                "real tokens": tokens / padded if padded else None,
            }
