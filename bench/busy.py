"""How long a worker with two threads, a trial of tune and the report take, alone and beside two busy loops.

``python -m bench.busy`` keeps itself and all that it starts on two cores.  Before: threads wait for each other as
long as their libraries let them by default.  Now: as the environment says, or else as this project has them wait,
so ``GOMP_SPINCOUNT=5000 python -m bench.busy`` tries another count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.contests import DEMO, ROOT
from bench.machine import machine, versions
from bench.processes import Failed, measure
from bench.rounds import say
from bench.sections import show
from bench.table import Spread
from ensemble.common.host import usable_cpus

_THREADS = 2
# Of libgomp's and libomp's documentation: what they take where nobody says anything.
_BEFORE = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
_SMALL = ROOT / "configs" / "pooled.yaml"
# As wide as BERT-base, and a third as deep.
_WIDE = {
    "model_type": "bert",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
}
_WIDE_ROWS = 150
_MAKE = "import json, sys; from pathlib import Path; from bench.shapes import make_full_size; " + (
    "make_full_size(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), 'float32', 'random')"
)
_TRIAL = """
import sys
from pathlib import Path
from ensemble.analysis.tune import MemberTrials, Trial
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
prepared = prepare(load([Path(sys.argv[1])], [f"output_dir={sys.argv[2]}"]))
member = MemberTrials(prepared, 0, 2_000, Path(sys.argv[2]), 0.02, print, owns_process=True)
trial = member._run(Trial("float32", {"dtype": "float32"}), None)
print(trial.failure or trial.seconds)
"""
_REPORT = """
import sys, time
from pathlib import Path
from ensemble.pipeline.report_page import write_page
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
rundir = RunDir(Path(sys.argv[1]))
rundir.report_page.unlink(missing_ok=True)
report = RunReport.read(rundir.run_json)
began = time.monotonic()
said = []
page = write_page(rundir, report, True, 1_800.0, lambda: False, said.append)
print(said[-1] if page is None else time.monotonic() - began)
"""
# At most, by what it took before, on a quiet machine.
AT_MOST = 1.03
WORKS = {
    "worker, small layers (128 wide), predicting": "small",
    "worker, wide layers (768 wide), predicting": "wide",
    "trial of tune, small layers, predicting": "trial",
    "process of the report": "report",
}


def compare(works: Mapping[str, str] = WORKS, repeats: int = 9) -> list[dict[str, object]]:
    """Measure each work before and now, alone and beside busy loops, in turn.

    Returns:
        a row for each work and machine: seconds (median, least to most), and the median of the rounds' ratios.

    Raises:
        Failed: a command failed, or there is one core alone.
    """
    if usable_cpus() < _THREADS or not hasattr(os, "sched_setaffinity"):
        raise Failed("two threads beside busy loops need two cores, on Linux")
    if psutil.cpu_percent(interval=0.3) > 25:
        say("busy machine: other programs compute here, so these figures say little")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:_THREADS])
    try:
        with tempfile.TemporaryDirectory(prefix="ensemble busy machine ") as made:
            return _rounds(Path(made), works, repeats)
    finally:
        os.sched_setaffinity(0, allowed)


def _rounds(folder: Path, works: Mapping[str, str], repeats: int) -> list[dict[str, object]]:
    now = {**os.environ, "OMP_NUM_THREADS": str(_THREADS), "HF_HUB_OFFLINE": "1"}
    now["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    before = {**now, **_BEFORE}
    before.pop("OMP_WAIT_POLICY", None)
    contestants = _contestants(folder, works, now)
    seconds: dict[tuple[str, int, bool], list[float]] = {}
    for number in range(repeats):
        for work, take in contestants.items():
            for loops in (0, _THREADS):
                with _busy_loops(loops):
                    # Whoever comes first has the colder caches.
                    for is_now in (False, True) if number % 2 else (True, False):
                        took = take(now if is_now else before)
                        seconds.setdefault((work, loops, is_now), []).append(took)
                        what = f"{'now' if is_now else 'before'}, {loops} loops: {took:.2f} s"
                        say(f"busy machine: round {number + 1} of {repeats}, {work}, {what}")
    return [
        _row(work, loops, seconds[work, loops, False], seconds[work, loops, True])
        for work in works
        for loops in (0, _THREADS)
    ]


def _row(work: str, loops: int, before: Sequence[float], now: Sequence[float]) -> dict[str, object]:
    ratio = Spread.of([one / other for one, other in zip(now, before, strict=True)])
    return {
        "what": work,
        "machine": f"beside {loops} loops at nice 10" if loops else "no loops",
        "before, s": Spread.of(before).text(2),
        "now, s": Spread.of(now).text(2),
        "now / before": ratio.text(3),
        "at most": "" if loops else AT_MOST,
        "": "" if loops else "ok" if ratio.middle <= AT_MOST else "MISSED",
    }


def _contestants(
    folder: Path, works: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Callable[[Mapping[str, str]], float]]:
    """What gives the seconds of each work, by an environment."""
    takes: dict[str, Callable[[Mapping[str, str]], float]] = {}
    for title, work in works.items():
        if work == "small":
            takes[title] = partial(_predict, folder, _SMALL)
        elif work == "wide":
            takes[title] = partial(_predict, folder, _wide(folder, environment))
        elif work == "trial":
            takes[title] = partial(_printed, folder, _TRIAL, (_SMALL, folder / "trial"))
        else:
            finished = folder / "finished"
            demo = [sys.executable, "-m", "ensemble", "run", str(ROOT / "configs" / "demo.yaml"), "--quiet"]
            demo += ["--set", f"output_dir={json.dumps(str(finished))}", "--set", "report=false"]
            measure([demo], folder, environment, folder / "demo.log")
            takes[title] = partial(_printed, folder, _REPORT, (finished,))
    return takes


def _wide(folder: Path, environment: Mapping[str, str]) -> Path:
    """The config of a wide model over the demo's first rows."""
    demo: dict[str, Any] = yaml.safe_load(_SMALL.read_text(encoding="utf-8"))
    labels = demo["labels"]
    make = [sys.executable, "-c", _MAKE, str(folder / "wide"), json.dumps(_WIDE), json.dumps(labels)]
    measure([make], folder, environment, folder / "wide.log")
    model = {"name": "wide", "model_name_or_path": str(folder / "wide"), "text_column": "gloss"}
    data = {"path": str(DEMO / "test.csv"), "label_column": "label"}
    config = {"data": data, "limit": _WIDE_ROWS, "labels": labels, "models": [model]}
    (folder / "wide.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "wide.yaml"


def _predict(folder: Path, config: Path, environment: Mapping[str, str]) -> float:
    """The seconds that the one worker of a run spends in predicting."""
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "ensemble", "run", str(config), "--quiet", "--set", "report=false"]
    command += ["--set", "cpu_workers=1", "--set", f"output_dir={json.dumps(str(output))}"]
    measure([command], folder, environment, folder / "run.log")
    report = json.loads((output / "run.json").read_text(encoding="utf-8"))
    (worker,) = report["members"][0]["workers"]
    return float(worker["counters"]["predict_seconds"])


def _printed(folder: Path, code: str, arguments: Sequence[Path], environment: Mapping[str, str]) -> float:
    """The number that some code prints last."""
    log = folder / "code.log"
    shutil.rmtree(folder / "trial", ignore_errors=True)
    measure([[sys.executable, "-c", code, *map(str, arguments)]], folder, environment, log)
    said = log.read_text(encoding="utf-8").splitlines()[-1]
    try:
        return float(said)
    except ValueError:
        raise Failed(said) from None


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """So many processes at nice 10 that do nothing but compute, until the block ends."""
    command = ["nice", "-n", "10", sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a line about the machine, and a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.busy", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, metavar="K", help="rounds; 9 where nothing is said")
    parser.add_argument("--only", default="", metavar="WORK", help=f"one of {', '.join(WORKS.values())}")
    options = parser.parse_args(arguments)
    works = {title: work for title, work in WORKS.items() if options.only in ("", work)}
    sys.stdout.write(f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}.\n\n")
    return show(lambda: compare(works, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
