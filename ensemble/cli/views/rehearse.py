"""Show a rehearsal: the forecast of each member, time, memory and disk of the whole run, and problems."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.commands.rehearse import MemberRehearsal, Rehearsal
from ensemble.common.text import duration, gib, plural, rate, shown_path

_HEADERS = "member,replicas,start-up,computing,rows/s,host memory,GPU memory,rows at limit".split(",")


def view(rehearsal: Rehearsal) -> Iterator[str | Table]:
    yield f"by a run of {rehearsal.sample_rows:,} of {plural(rehearsal.rows, 'row')}:"
    yield Table(_HEADERS, [_cells(member) for member in rehearsal.members])
    yield from rehearsal.assumed
    seconds, limit, other = rehearsal.seconds, rehearsal.time_limit_seconds, rehearsal.other_seconds
    time = f"the whole run would take about {duration(seconds)}"
    if limit is not None:
        time += f", {seconds / limit:.0%} of time_limit ({duration(limit)})"
    if other > 0:
        time += f"; {duration(other)} of it are neither start-up nor computing of a member"
    yield time
    if rehearsal.host_bytes is not None:
        free = ""
        if rehearsal.host_free_bytes is not None:
            free = f" of {gib(rehearsal.host_free_bytes)} that are free"
        yield f"memory: {gib(rehearsal.host_bytes)}{free}, all processes that run at a time together"
    parts = ", ".join(f"{purpose} {gib(size)}" for purpose, size in rehearsal.disk_bytes.items() if size)
    yield (
        f"disk: {gib(sum(rehearsal.disk_bytes.values()))} of {gib(rehearsal.disk_free_bytes)} that are free at "
        f"{shown_path(rehearsal.output_dir)} ({parts})"
    )
    yield from (f"! {text}" for text in (*rehearsal.warnings, *rehearsal.problems))
    if limit is not None and not rehearsal.problems:
        yield f"It would end in time, {duration(limit - seconds)} before the limit."


def _cells(member: MemberRehearsal) -> list[str]:
    seconds = member.compute_seconds
    sizes = (member.peak_memory_bytes, member.peak_gpu_memory_bytes)
    return [
        member.name,
        str(member.replicas),
        duration(member.startup_seconds),
        duration(seconds),
        rate(member.rows / seconds) if seconds else "",
        *("" if size is None else gib(size) for size in sizes),
        "" if member.rows_at_limit is None else f"{member.rows_at_limit:,}",
    ]
