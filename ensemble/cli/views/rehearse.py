"""What ``rehearse`` shows: what each member would take; the whole run's time, memory and disk; what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.commands.rehearse import MemberRehearsal, Rehearsal
from ensemble.common.text import duration, gib, plural, rate, shown_path

_HEADERS = (
    "member,replicas,start-up,computing,rows/s,host memory,GPU memory,GPU forecast,usable,rows at limit"
).split(",")


def view(rehearsal: Rehearsal) -> Iterator[str | Table]:
    """Show a table of the members, a sentence each on time, memory and disk, and each problem."""
    rows = rehearsal.rows
    yield f"by a run of {rehearsal.sample_rows:,} of {plural(rows, 'row')}:"
    yield Table(_HEADERS, [_cells(member) for member in rehearsal.members])
    yield from rehearsal.assumed
    seconds, limit = rehearsal.seconds, rehearsal.time_limit_seconds
    of_limit = ""
    if limit is not None:
        of_limit = f", {seconds / limit:.0%} of time_limit ({duration(limit)})"
    other = rehearsal.other_seconds
    rest = f"; {duration(other)} of it are neither start-up nor computing of a member" if other > 0 else ""
    yield f"the whole run would take about {duration(seconds)}{of_limit}{rest}"
    if (needed := rehearsal.host_bytes) is not None:
        free = rehearsal.host_free_bytes
        of_free = "" if free is None else f" of {gib(free)} that are free"
        yield f"memory: {gib(needed)}{of_free}, all processes that run at a time together"
    disk = rehearsal.disk_bytes
    parts = [f"{what} {gib(size)}" for what, size in disk.items() if size]
    yield (
        f"disk: {gib(sum(disk.values()))} of {gib(rehearsal.disk_free_bytes)} that are free at "
        f"{shown_path(rehearsal.output_dir)} ({', '.join(parts)})"
    )
    yield from (f"! {warning}" for warning in rehearsal.warnings)
    if rehearsal.problems:
        yield from (f"! {problem}" for problem in rehearsal.problems)
    elif limit is not None:
        yield f"It would end in time, {duration(limit - seconds)} before the limit."


def _cells(member: MemberRehearsal) -> list[str]:
    memory = (
        member.peak_memory_bytes,
        member.peak_gpu_memory_bytes,
        member.forecast_bytes,
        member.usable_bytes,
    )
    compute = member.compute_seconds
    return [
        member.name,
        str(member.replicas),
        duration(member.startup_seconds),
        duration(compute),
        rate(member.rows / compute) if compute else "",
        *("" if size is None else gib(size) for size in memory),
        "" if member.rows_at_limit is None else f"{member.rows_at_limit:,}",
    ]
