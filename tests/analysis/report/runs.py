"""Directories of runs that never were, with names and texts that nobody should trust."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ensemble.common.gpus import Device
from ensemble.data.csv_file import write_csv
from ensemble.jobs.work import Computation
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from ensemble.scheduling.records import FaultRecord, Gap
from tests.cli.reports import member, report, worker

EVIL = (
    "<script>window.harmed = 1</script>",
    "\"><img src=x onerror='window.harmed = 1'>",
    "' onmouseover='window.harmed = 1",
    "javascript:window.harmed=1",
    "</svg></title><script>window.harmed = 1</script>",
    "]]>&lt;b&gt; &amp; $x_1$ \\frac{ 中文 \u202e \x01 _",
    "{{ 7 * 7 }} {% raw %} ${HOME}",
    '=HYPERLINK("https://example.com")',
)
GIB = 2**30


def make_run(
    folder: Path, names: Sequence[str] = ("gemma", "llama", "qwen"), rows: int = 60, is_evil: bool = False
) -> RunReport:
    """Write the directory of a run on two GPUs, below ``folder``; the table lies beside it.

    Args:
        is_evil: labels, ids, texts, messages and the config are taken from ``EVIL``.
    """
    chooser = np.random.default_rng(0)
    labels = EVIL[:3] if is_evil else ("lose", "tie", "win")
    rundir, table = RunDir(folder / "run"), folder / "table.csv"
    for needed in (rundir.predictions_dir, rundir.logs_dir):
        needed.mkdir(parents=True)
    ids = pa.array([f"{EVIL[row % len(EVIL)]}{row}" if is_evil else f"r{row}" for row in range(rows)])
    lengths = chooser.lognormal(4, 1, rows).astype(int) + 1
    if is_evil:
        texts = pa.array([EVIL[row % len(EVIL)] * int(1 + lengths[row] // 30) for row in range(rows)])
    else:
        texts = pa.DictionaryArray.from_arrays(
            lengths.clip(1, 2_000) - 1, [("word " * size)[:size] for size in range(1, 2_001)]
        ).cast(pa.string())
    truth = chooser.integers(0, 3, rows)
    write_csv(table, ["id", "text", "label"], [[ids, texts, pa.array(np.array(labels)[truth])]])
    hint = np.eye(3)[truth]
    merged = np.zeros((rows, 3))
    for place, name in enumerate(names):
        values = np.exp(chooser.normal(size=(rows, 3)) + hint * (1.0 + 0.2 * place))
        values /= values.sum(axis=1, keepdims=True)
        merged += values / len(names)
        write_csv(rundir.predictions(name), ["id", *labels], [[ids, *map(pa.array, values.T)]])
    write_csv(rundir.ensemble, ["id", *labels], [[ids, *map(pa.array, merged.T)]])
    message = EVIL[0] if is_evil else "CUDA error: an illegal memory access was encountered"
    made = report(
        *(_member(place, name, rows, message) for place, name in enumerate(names)),
        rows=rows,
        null_texts={"text": 1},
        timing={"total_seconds": 700.0},
        devices=tuple(Device(f"GPU-{n}", "Tesla T4", (7, 5), 15 * GIB, 0) for n in (0, 1)),
        driver_version="550.90.07",
        idle_gaps=tuple(
            Gap(f"GPU-{n}", names[k], names[k + 1], 3.1 + k) for k in range(len(names) - 1) for n in (0, 1)
        ),
        warnings=(message,),
        explanation=message,
        table=str(table),
        config=("# " + " ".join(EVIL).replace("\x01", "") + "\n" if is_evil else "")
        + "data: {path: table.csv, label_column: label}\nlabels: []\n",
        overrides=(f"output_dir={message}",),
        files={"ensemble": str(rundir.ensemble)},
        merged_rows=dict.fromkeys(names, rows),
        ensemble={"method": "mean"},
        **(_seldom_there(names, message) if is_evil else {}),
    )
    made.write(rundir.run_json)
    return made


def _seldom_there(names: Sequence[str], message: str) -> dict[str, Any]:
    """What few runs have and the page shows, in these words."""
    return {
        "left_out": (names[-1],),
        "filled_rows": 1,
        "tuned_on": {"date": message, "devices": [message]},
        "platform": message,
    }


def _member(place: int, name: str, rows: int, message: str) -> Any:
    begin = 220.0 * place
    shared: dict[str, Any] = {
        **{"leased_after_seconds": begin, "start_seconds": 8.0, "load_seconds": 30.0, "life_seconds": 219.0},
        **{"started_after_seconds": max(0.0, begin - 40.0), "device": "Tesla T4", "dtype": "float16"},
        **{"rows": rows // 2, "tokens": rows * 40, "padded_tokens": rows * 42, "batches": rows // 16},
        **{
            "truncated_rows": rows // 20,
            "cut_tokens": rows // 20 * 77,
            "forward_seconds": 170.0,
            "predict_seconds": 180.0,
            "chunks": 8,
        },
        **{"peak_gpu_memory_bytes": 11 * GIB, "max_length": 512},
    }
    fault = FaultRecord(
        name, 1, "death", message, message, (10, 20), "a fresh process takes them over", begin + 90
    )
    return member(
        name,
        workers=tuple(worker(replica=n, devices=(f"GPU-{n}",), log_path=message, **shared) for n in (0, 1)),
        rows=rows,
        activation="softmax",
        faults=(fault,),
        bad_rows={"3": message},
        reused_rows=rows // 2,
        computed_before=(
            Computation(
                at="2026-01-01T00:00:00+00:00",
                seconds=7.0,
                versions={message: message},
                devices={"GPU-0": message, "GPU-1": message},
            ),
        ),
        replicas=2,
    )
