"""Whole runs on a CPU by one worker, by several side by side, and by what ``cpu_workers: auto`` makes of it.

``python -m bench.cpu_workers`` runs the demo's trained models, both and one of them alone, over the demo's glosses
and pairs of them, and a cross-encoder of the benchmark over pairs of texts, with every setting in turn, each as a
first run that knows no speeds.  Before, this CPU is measured as a run of some minutes measures it, into a cache of
its own; beside other programs that is not kept, and ``auto`` goes by what is assumed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from bench.agreement import Disagreement
from bench.agreement import compare as agree
from bench.checkpoints import ENCODER, WORDS_FILE
from bench.contests import DEMO, ROOT, Ground, Work
from bench.data import Words, Writer, write_table
from bench.processes import Failed, cpu_seconds, measure
from bench.rounds import say
from bench.sections import show
from bench.table import Spread
from ensemble.common.host import is_busy, usable_cpus
from ensemble.common.text import plural
from ensemble.planning.plan import workers_beside

# Members, and rows with which they take 20 to 60 s on two cores: the demo's are 128 wide, the other one 384.
WORKS = {"gemma2, llama": 80_000, "gemma2": 120_000, ENCODER: 1_000}
_SEED = 20
# The time of ``auto`` by that of the fastest number of workers, where it chose another: less is noise.
AT_MOST = 1.05
_MEASURE = """
import sys
from ensemble.scheduling.launchers.cpu_scaling import measured_scaling
found = measured_scaling([*map(int, sys.argv[1:])])
print(dict(found.slowdowns), found.problem)
"""


@dataclass(frozen=True)
class _Sample:
    """A run: wall and CPU seconds, how many workers shared the CPU, and by what figures."""

    seconds: float
    cpu_seconds: float
    workers: int
    slowdowns: dict[str, float]


def compare(
    works: Mapping[str, int] = WORKS, repeats: int = 3, is_measured: bool = True
) -> list[dict[str, object]]:
    """Run each work with every setting, in turn, and compare what they wrote.

    Args:
        works: rows by members.
        is_measured: measure the CPU before.

    Returns:
        a row for each work and setting: seconds and CPU seconds (median, least to most), the time by that of the
        fastest number of workers (the median of the rounds'), and of ``auto`` what it chose, and by which figures.

    Raises:
        Failed: a run failed or computed something else, or there is one core alone.
    """
    if not (counts := workers_beside(usable_cpus())):
        raise Failed("workers side by side need two cores")
    settings = [*map(str, (1, *counts)), "auto"]
    samples: dict[str, dict[str, list[_Sample]]] = {}
    with tempfile.TemporaryDirectory(prefix="ensemble cpu workers ") as made:
        folder = Path(made)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        if is_busy():
            say("cpu workers: other programs compute here, so these figures say little")
        if is_measured:
            log = folder / "measured.log"
            measure([[sys.executable, "-c", _MEASURE, *map(str, counts)]], folder, environment, log)
            say(f"cpu workers: measured {log.read_text().strip()}")
        for work, rows in works.items():
            _prepare(folder, work, rows, environment)
        for number in range(repeats):
            for work in works:
                for setting in settings:
                    sample = _run(folder / work, setting, environment)
                    samples.setdefault(work, {}).setdefault(setting, []).append(sample)
                    what = f"{sample.seconds:.1f} s, {plural(sample.workers, 'worker')}"
                    say(f"cpu workers: round {number + 1} of {repeats}, {work}, {setting}: {what}")
                _check(folder / work, _members(work), settings)
    return [row for work, found in samples.items() for row in _rows(work, works[work], found)]


def _rows(work: str, rows: int, found: Mapping[str, Sequence[_Sample]]) -> Iterator[dict[str, object]]:
    given = {
        setting: median(one.seconds for one in each) for setting, each in found.items() if setting != "auto"
    }
    best = min(given, key=given.__getitem__)
    fastest = found[best]
    for setting, each in found.items():
        ratio = Spread.of([one.seconds / other.seconds for one, other in zip(each, fastest, strict=True)])
        row: dict[str, object] = {
            "members": work,
            "rows": rows,
            "cpu_workers": setting,
            "s": Spread.of([one.seconds for one in each]).text(1),
            "CPU s": Spread.of([one.cpu_seconds for one in each]).text(1),
            "time / fastest number": ratio.text(3),
            "at most": "",
            "chosen": "",
            "slowdowns": "",
            "verdict": "",
        }
        if setting == "auto":
            chosen = {str(one.workers) for one in each}
            row |= {"at most": AT_MOST, "chosen": ", ".join(sorted(chosen))}
            row["slowdowns"] = ", ".join(f"{n}: {x:.2f}" for n, x in each[0].slowdowns.items()) or "assumed"
            row["verdict"] = "ok" if chosen == {best} or ratio.middle <= AT_MOST else "MISSED"
        yield row


def _texts(rows: int) -> Iterator[str]:
    """The demo's glosses, and then two of them at a time, no pair twice."""
    with (DEMO / "test.csv").open(newline="", encoding="utf-8") as file:
        glosses = [row["gloss"] for row in csv.DictReader(file)]
    for number in range(rows):
        turn, first = divmod(number, len(glosses))
        second = f"; {glosses[(first + turn) % len(glosses)]}" if turn else ""
        yield glosses[first] + second


def _prepare(folder: Path, work: str, rows: int, environment: Mapping[str, str]) -> None:
    """Write a work's table and config into a folder of its name."""
    if work == ENCODER:
        checkpoints = folder / "checkpoints"
        make = [sys.executable, "-m", "bench.checkpoints", str(checkpoints)]
        measure([make], ROOT, environment, folder / "checkpoints.log")
        known = json.loads((checkpoints / WORDS_FILE).read_text(encoding="utf-8"))
        writer = Writer(Words(tuple(known["words"]), tuple(known["tokens"])), _SEED)
        pairs = Work(work, "pairs", (work,), rows, quick_models=1, contestants=())
        Ground(folder, environment).prepare(pairs, rows, writer)
        return
    (folder / work).mkdir()
    write_table(folder / work / "table.csv", ["gloss"], [[text] for text in _texts(rows)])
    demo = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    models = [{"name": one, "model_name_or_path": str(DEMO / "models" / one)} for one in _members(work)]
    config = {
        "data": {"path": str(folder / work / "table.csv"), "id_column": "id"},
        **{"labels": demo["labels"], "models": models, "defaults": demo["defaults"], "report": False},
    }
    (folder / work / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def _members(work: str) -> list[str]:
    return work.split(", ")


def _run(folder: Path, setting: str, environment: Mapping[str, str]) -> _Sample:
    shutil.rmtree(folder / setting, ignore_errors=True)
    command = [sys.executable, "-m", "ensemble", "run", "config.yaml", "--quiet"]
    command += ["--set", f"output_dir=./{setting}", "--set", f"cpu_workers={setting}"]
    before = cpu_seconds()
    took = measure([command], folder, environment, folder / "run.log")
    report: dict[str, Any] = json.loads((folder / setting / "run.json").read_text(encoding="utf-8"))
    return _Sample(
        seconds=took.seconds,
        cpu_seconds=cpu_seconds() - before,
        workers=max(round(1 / one["speed"]["cpu_share"]) for one in report["members"]),
        slowdowns=(report["cpu_scaling"] or {}).get("slowdowns", {}),
    )


def _check(folder: Path, models: Sequence[str], settings: Sequence[str]) -> None:
    first, *others = settings
    try:
        for name in models:
            expected = _probabilities(folder / first, name)
            for one in others:
                agree(expected, _probabilities(folder / one, name), f"cpu_workers {first} and {one}, {name}")
    except Disagreement as error:
        raise Failed(str(error)) from error


def _probabilities(output: Path, name: str) -> npt.NDArray[np.float64]:
    """[rows, labels]."""
    with (output / "predictions" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_workers", description=__doc__)
    parser.add_argument("--rows", type=int, metavar="N", help="of every table, for a trial")
    parser.add_argument("--repeats", type=int, default=5, metavar="K", help="rounds; 5 where nothing is said")
    options = parser.parse_args(arguments)
    works = dict.fromkeys(WORKS, options.rows) if options.rows else WORKS
    return show(lambda: compare(works, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
