"""What each test costs: seconds that pass, and processor seconds of all processes that it starts.

    pytest --costs                              prints both by room (tests/<room>) at the end
    pytest --durations-file=build/costs.tsv     writes a line for each test as soon as it has ended

A test's processor seconds are those of its process, of the processes that were waited for, and of those that still
run.  What a fixture of a module or session costs, the first test that asks for it bears.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

WALL, PROCESSORS = "seconds", "processor seconds"
_BEGAN = pytest.StashKey[tuple[float, float]]()
_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="print the tests' seconds by room at the end")
    parser.addoption(
        "--durations-file", metavar="FILE", help="write each test's seconds there, tab-separated"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # among xdist's processes, the one that hears of all tests
        config.pluginmanager.register(_Costs(config.getoption("--durations-file")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = time.monotonic(), processor_seconds(os.getpid())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Put a test's seconds into the last of its three reports, which xdist hands on."""
    if call.when == "teardown" and _BEGAN in item.stash:
        wall, processors = item.stash[_BEGAN]
        item.user_properties.append((WALL, time.monotonic() - wall))
        item.user_properties.append((PROCESSORS, processor_seconds(os.getpid()) - processors))


def processor_seconds(pid: int) -> float:
    """Return what a process, its living descendants and the processes that they have waited for have used.

    A process that has ended, or another system's: 0.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return 0.0
    # proc(5): behind the name in brackets, utime, stime, cutime and cstime are the 12th to 15th.
    ticks = sum(int(field) for field in stat.rpartition(")")[2].split()[11:15])
    return ticks / _TICKS + sum(processor_seconds(int(child)) for child in children)


class _Costs:
    def __init__(self, file: str | None) -> None:
        self._file = Path(file) if file else None
        self._by_room: dict[str, list[tuple[float, float]]] = defaultdict(list)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(f"test\t{WALL}\t{PROCESSORS}\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured = {name: value for name, value in report.user_properties if isinstance(value, float)}
        if report.when != "teardown" or PROCESSORS not in measured:
            return
        costs = measured[WALL], measured[PROCESSORS]
        self._by_room[room_of(report.nodeid)].append(costs)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("\t".join([report.nodeid, *(f"{cost:.2f}" for cost in costs)]) + "\n")

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if not config.getoption("--costs"):
            return
        terminalreporter.section("seconds by room")
        rows = [
            (room, len(costs), *(sum(column) for column in zip(*costs, strict=True)))
            for room, costs in self._by_room.items()
        ]
        rows.sort(key=lambda row: row[3], reverse=True)
        rows.append(("all", *(sum(row[place] for row in rows) for place in (1, 2, 3))))
        terminalreporter.write_line(f"{'room':<14}{'tests':>8}{WALL:>10}{PROCESSORS:>20}")
        for room, count, wall, processors in rows:
            terminalreporter.write_line(f"{room:<14}{count:>8,}{wall:>10,.0f}{processors:>20,.0f}")


def room_of(name: str) -> str:
    """Return the folder below tests/ of a test's name; ``tests`` for those beside the rooms."""
    folders = name.partition("::")[0].split("/")
    return folders[1] if len(folders) > 2 else "tests"
