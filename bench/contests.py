"""Who competes with whom, on which rows and models, and what must be reached."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from bench.checkpoints import DECODERS, ENCODER, LABELS, PAIR_LABELS
from bench.cold import forget
from bench.data import Writer, write_table
from bench.processes import Failed, Measured, measure
from ensemble.common.host import cpu_products

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
_DEMO = ("gemma2", "llama")
_OVERLAY = "tuned.yaml"
OURS = "this project"
# With the settings that ``tune`` has found, at its usual tolerance.
TUNED = "this project, tuned"
MAX_LENGTH = 512
# Of every table in a short benchmark.
QUICK_ROWS = 20
_REPEATED_SHARE = 0.3


@dataclass(frozen=True)
class Work:
    """Rows and models that some contestants are given.

    Attributes:
        rows: of the table, for a full run.
        quick_models: how many of the models a short one has.
        contestants: the scripts that run beside this project.
        is_cold: nothing of libraries and checkpoints is in the page cache when a contestant starts.
    """

    name: str
    kind: str
    models: tuple[str, ...]
    rows: int
    quick_models: int
    contestants: tuple[str, ...]
    is_cold: bool = False


@dataclass(frozen=True)
class Target:
    """A row of the table: the ratio ``ours`` / ``against``.

    Attributes:
        at_most: what it may be; None: it is shown, and nothing was promised.
        phase: compare the time in the models alone, not the whole command's.
        enough_seconds: with less work than this for the slower side, it is measured how processes start.
    """

    title: str
    work: str
    against: str
    at_most: float | None
    phase: bool = False
    enough_seconds: float = 60.0
    ours: str = OURS


# Only where the CPU has products in bfloat16.
_TUNED = 0.40 if "bf16" in cpu_products() else None
# Sized for two cores on which a notebook loop gets through 7,000 padded tokens a second: every slower side has at
# least a minute of work, and three rounds take three quarters of an hour.
WORKS = (
    Work("two", "single", DECODERS[:2], 800, 1, ("notebook_loop", "pipeline", "chain")),
    Work("pairs", "pairs", (ENCODER,), 1000, 1, ("cross_encoder",)),
    Work("three", "single", DECODERS, 2400, 2, ("by_hand", "floor")),
    Work("repeated", "repeated", DECODERS[:1], 1400, 1, ("notebook_loop",)),
    Work("short", "short", DECODERS, 15_000, 1, (TUNED, "by_hand")),
    Work("demo, one", "demo", _DEMO[:1], 2000, 1, ("by_hand",)),
    Work("demo, two", "demo", _DEMO, 2000, 2, (TUNED, "by_hand")),
    Work("demo, two, cold", "demo", _DEMO, 2000, 2, ("by_hand",), is_cold=True),
)
TARGETS = (
    Target("notebook loop, long-tailed rows", "two", "notebook_loop", 0.25),
    Target("transformers pipeline", "two", "pipeline", 0.30),
    Target("chain of scripts, a notebook loop in each", "two", "chain", 0.30),
    Target("CrossEncoder.predict, text pairs", "pairs", "cross_encoder", 1.00),
    Target("script by hand, three members, long-tailed rows", "three", "by_hand", 1.05, enough_seconds=90),
    Target("floor (real tokens only), inference phase", "three", "floor", 1.10, phase=True),
    Target("notebook loop, 30 % of the rows repeat others", "repeated", "notebook_loop", 0.25),
    Target("script by hand, three members, short rows", "short", "by_hand", 0.70, enough_seconds=50),
    Target(
        "script by hand, three members, short rows; this project tuned",
        "short",
        "by_hand",
        _TUNED,
        enough_seconds=50,
        ours=TUNED,
    ),
    Target("script by hand, one demo model, the demo's short rows", "demo, one", "by_hand", None),
    Target("script by hand, two demo models", "demo, two", "by_hand", None),
    Target("script by hand, two demo models; this project tuned", "demo, two", "by_hand", None, ours=TUNED),
    Target("script by hand, two demo models, nothing in the page cache", "demo, two, cold", "by_hand", None),
)


@dataclass(frozen=True)
class Sample:
    """One contestant's run.

    Attributes:
        phase_seconds: in the models alone; None where that is not known.
        report: this project's run.json; empty for the others.
    """

    measured: Measured
    phase_seconds: float | None
    report: Mapping[str, Any]


class Ground:
    """A folder where works are prepared and contestants run.

    Args:
        folder: holds ``checkpoints`` as ``bench.checkpoints`` makes them; relative paths are of no use.
        environment: of every process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment

    def prepare(self, work: Work, rows: int, writer: Writer) -> None:
        """Write the table and this project's config."""
        place = self.folder / work.name
        place.mkdir()
        if work.kind == "pairs":
            write_table(place / "table.csv", ["first", "second"], writer.pairs(rows))
        else:
            if work.kind == "demo":
                with (DEMO / "test.csv").open(newline="", encoding="utf-8") as file:
                    texts = [row["gloss"] for row in itertools.islice(csv.DictReader(file), rows)]
            elif work.kind == "repeated":
                texts = writer.repeated(rows, _REPEATED_SHARE)
            else:
                texts = writer.short(rows) if work.kind == "short" else writer.single(rows)
            write_table(place / "table.csv", ["text"], [[text] for text in texts])
        (place / "config.yaml").write_text(yaml.safe_dump(self._config(work)), encoding="utf-8")

    def run(self, work: Work, contestant: str) -> Sample:
        """Run one contestant afresh; its probabilities are for ``probabilities``.

        Raises:
            Failed: one of its processes has failed.
        """
        place = self.folder / work.name
        output = place / contestant
        shutil.rmtree(output, ignore_errors=True)
        log = place / f"{contestant}.log"
        if work.is_cold:
            forget(sys.prefix, *self._job(work, list(work.models), Path())["models"].values())
        if contestant in (OURS, TUNED):
            command = [sys.executable, "-m", "ensemble", "run", "config.yaml", "--quiet"]
            if contestant == TUNED:
                command += [_OVERLAY, "--set", f"output_dir={TUNED}"]
                if not (place / _OVERLAY).exists():
                    tune = [sys.executable, "-m", "ensemble", "tune", "config.yaml", "--write", _OVERLAY]
                    try:
                        measure([tune], place, self._environment, log)
                    except Failed:
                        if work.rows > QUICK_ROWS:
                            raise
                        # Beside other programs ``tune`` chooses nothing by so few rows.
                        (place / _OVERLAY).write_text("{}\n", encoding="utf-8")
            measured = measure([command], place, self._environment, log)
            report = json.loads((output / "run.json").read_text(encoding="utf-8"))
            return Sample(measured, _phase_seconds(report), report)
        output.mkdir()
        # A chain of scripts is the notebook's loop with one model each.
        script = "notebook_loop" if contestant == "chain" else contestant
        shares = [[name] for name in work.models] if contestant == "chain" else [list(work.models)]
        commands = []
        for number, share in enumerate(shares):
            job = place / f"{contestant}-{number}.json"
            job.write_text(json.dumps(self._job(work, share, output)), encoding="utf-8")
            commands.append([sys.executable, str(ROOT / "bench" / "peers" / f"{script}.py"), str(job)])
        measured = measure(commands, place, self._environment, log)
        phase = None
        if contestant == "floor":
            phase = float(json.loads((output / "floor.json").read_text(encoding="utf-8"))["seconds"])
        return Sample(measured, phase, {})

    def probabilities(self, work: Work, contestant: str, model: str) -> npt.NDArray[np.float64]:
        """What a contestant's last run computed, [rows, labels] in the table's order."""
        output = self.folder / work.name / contestant
        if contestant not in (OURS, TUNED):
            found = np.asarray(np.load(output / f"{model}.npy"), dtype=np.float64)
            if work.kind != "demo":
                return found
            own = _demo_labels(model)  # in an order of its own
            return found[:, [own.index(label) for label in _demo_labels()]]
        with (output / "predictions" / f"{model}.csv").open(newline="", encoding="utf-8") as file:
            _, *rows = list(csv.reader(file))
        if [row[0] for row in rows] != [f"r{number}" for number in range(len(rows))]:
            raise Failed(f"{model}: this project's predictions are not in the table's order")
        return np.array([[float(cell) for cell in row[1:]] for row in rows])

    def floor_tokens(self, work: Work) -> int:
        """The tokens that the floor's last run computed."""
        text = (self.folder / work.name / "floor" / "floor.json").read_text(encoding="utf-8")
        return int(json.loads(text)["tokens"])

    def _job(self, work: Work, models: list[str], output: Path) -> dict[str, Any]:
        checkpoints = DEMO / "models" if work.kind == "demo" else self.folder / "checkpoints"
        return {
            "table": str(self.folder / work.name / "table.csv"),
            "columns": ["first", "second"] if work.kind == "pairs" else ["text"],
            "models": {name: str(checkpoints / name) for name in models},
            "max_length": MAX_LENGTH,
            "output": str(output),
        }

    def _config(self, work: Work) -> dict[str, Any]:
        job = self._job(work, list(work.models), Path())
        is_pairs = work.kind == "pairs"
        # One score a pair, through a sigmoid, as CrossEncoder gives it.
        own = {"text_column": job["columns"], "problem_type": "multi_label_classification"}
        return {
            "data": {"path": job["table"]},
            "labels": list(PAIR_LABELS if is_pairs else _demo_labels() if work.kind == "demo" else LABELS),
            "defaults": {"max_length": MAX_LENGTH, **(own if is_pairs else {"text_column": "text"})},
            "models": [{"name": name, "model_name_or_path": path} for name, path in job["models"].items()],
            "output_dir": OURS,
            "report": False,  # the others write none either
        }


def _phase_seconds(report: Mapping[str, Any]) -> float:
    """In the models, with all cores: of workers side by side each had a part of them."""
    workers = [worker for member in report["members"] for worker in member["workers"]]
    spans = sorted(
        (one["leased_after_seconds"], one["leased_after_seconds"] + (one["life_seconds"] or 0.0))
        for one in workers
    )
    busy = reached = 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    together = sum(end - begin for begin, end in spans) / busy if busy else 1.0
    return float(sum(worker["counters"]["predict_seconds"] for worker in workers) / together)


def _demo_labels(model: str = _DEMO[0]) -> list[str]:
    """As its checkpoint has them, in order."""
    config = json.loads((DEMO / "models" / model / "config.json").read_text(encoding="utf-8"))
    return [label for _, label in sorted(config["id2label"].items(), key=lambda item: int(item[0]))]
