"""Tell experiment trackers (``report_to``) of a merged run, each by a process of its own, which may hang."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ensemble.common.python_process import die_with_parent, python_command
from ensemble.common.redact import Redactor, guard_output
from ensemble.config import LoadedConfig
from ensemble.pipeline.report_page import page_digest, run_apart
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import MERGED, RunReport

_MAX_SECONDS = 120.0
_FOREIGN = r"[^\w./: -]"  # characters that MLflow does not take in names


def missing_trackers(loaded: LoadedConfig) -> Iterator[str]:
    """Yield a sentence for each tracker whose package is not installed."""
    where = loaded.document.where(("report_to",))
    for name in loaded.config.report_to or ():
        if getattr(find_spec(name), "origin", None) is None:  # as of a mere folder of that name
            yield f"{where}: the package {name} is not installed; pip install {name}, or leave {name} out"


def tell_trackers(
    loaded: LoadedConfig, report: RunReport, seconds_left: float, is_stopped: Callable[[], bool]
) -> Iterator[str]:
    """Tell trackers of a merged run, except those whose log says that they know; yield why one was not told."""
    config, rundir = loaded.config, RunDir(loaded.config.output_dir)
    if not config.report_to or report.status not in MERGED:
        return
    settings = loaded.document.data | {key: getattr(report, key) for key in ("status", "rows", "versions")}
    settings["models"] = {model["name"]: {**model, "name": None} for model in settings["models"]}
    page = str(rundir.report_page.absolute()) if rundir.report_page.is_file() else None
    content = rundir.root.absolute().name, page, dict(_flat(settings)), _metrics(report)
    text = json.dumps(loaded.redactor.document(content), default=str).encode()
    sent = f"sent {page_digest(replace(report, config='', overrides=()))}"  # a comment changes nothing
    end = time.monotonic() + seconds_left - 2  # which the end of the run takes
    for name in config.report_to:
        path, seconds = rundir.logs_dir / f"{name}.log", min(_MAX_SECONDS, end - time.monotonic())
        if path.is_file() and sent in path.read_text("utf-8", "replace").splitlines():
            continue
        command = [*python_command(__name__), name, sent, str(os.getpid())]
        late = "time_limit leaves no time for it" if seconds <= 0 else ""
        if why := late or run_apart(command, path, seconds, is_stopped, text):
            yield f"{name} was not told of this run: {why}. The results are complete; the same command tries again"


def main() -> None:
    """Send what standard input says to the tracker of the first argument, and print the second."""
    tracker, sent, parent = sys.argv[1:]
    die_with_parent(int(parent))
    guard_output(Redactor(os.environ))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A server that is down is known after 10 seconds; by MLflow's default, after minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    try:
        _send(import_module(tracker), *json.load(sys.stdin))
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    print(sent)  # noqa: T201


def _send(library: Any, name: str, page: str | None, settings: Any, metrics: Any) -> None:
    if library.__name__ == "mlflow":
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            library.set_experiment("ensemble")
        with library.start_run(run_name=name):
            library.log_params(settings)
            library.log_metrics(metrics)
            if page:
                library.log_artifact(page)
    else:
        project = os.environ.get(f"{library.__name__.upper()}_PROJECT", "ensemble")
        library.init(project=project, name=name, config=settings)
        library.log(metrics)
        if page:
            library.log_artifact(page, name="report", type="report")
        library.finish()


def _flat(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield settings by keys such as ``models.gemma2.weight``."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _flat(item, re.sub(_FOREIGN, "_", f"{key}.{inner}").lstrip("."))
    elif value is not None:
        yield key, json.dumps(value) if isinstance(value, list) else value


def _metrics(report: RunReport) -> dict[str, float]:
    """Return scores, seconds and peaks of memory by names such as ``gemma2/log_loss``."""
    metrics: dict[str, Any] = {**report.timing, "gain": report.gain and report.gain.gain}
    scores = {name: vars(score) | score.metrics for name, score in report.scores.items()}
    for owner, values in (scores | report.answers).items():
        metrics |= {f"{owner}/{key}": value for key, value in values.items() if type(value) is float}
    for member in report.members:
        metrics[f"{member.name}/seconds"] = sum(done.seconds for done in member.computations) or None
        metrics[f"{member.name}/peak_memory_bytes"] = member.peak("peak_memory_bytes") or None
        metrics[f"{member.name}/peak_gpu_memory_bytes"] = member.peak("peak_gpu_memory_bytes") or None
    return {re.sub(_FOREIGN, "_", key): value for key, value in metrics.items() if value is not None}
