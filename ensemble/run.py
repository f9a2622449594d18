"""The road of a run, in order, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble import rundir as rundirs
from ensemble.config import LoadedConfig
from ensemble.csvfile import write_csv
from ensemble.devices import Device, worker_environment
from ensemble.errors import Interrupted, MembersFailed, OutputError
from ensemble.launch.local import LocalWorker
from ensemble.leases import Leases
from ensemble.merge.align import read_predictions
from ensemble.merge.combine import weighted_mean
from ensemble.merge.gather import gather_parts
from ensemble.merge.metrics import Score, score
from ensemble.plan import MemberPlan
from ensemble.prepare import Prepared, prepare, scores_make_sense, text_columns
from ensemble.protocol import Start, WorkerSpec
from ensemble.report.progress import Display
from ensemble.report.runjson import run_document, write_run_json
from ensemble.report.terminal import ENSEMBLE_ROW, failure_text, shown_path
from ensemble.rundir import RunDir, atomic_path, part_path
from ensemble.scheduler import MemberState, Scheduler, Worker
from ensemble.submission import write_submission

log = logging.getLogger("ensemble")


@dataclass
class RunResult:
    """What a run left: the records of members and devices, scores by name, and the files by what they are."""

    members: list[MemberState]
    leases: Leases
    scores: dict[str, Score] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


def run(loaded: LoadedConfig, display: Display) -> RunResult:
    """Run a config from its checks to its merged files.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 when the directory is in use, 1 when
            a member failed (the other members' CSVs stand), 130/143 on a signal.
    """
    began = time.monotonic()
    prepared = prepare(loaded)
    for text in (prepared.inventory.note, *prepared.warnings):
        if text:
            display.say(text)
    rundir = RunDir(prepared.config.output_dir)
    rundir.create()
    with rundirs.hold(rundir), _signals_raise(), _disk_errors_named(rundir):
        rundir.clear()
        with _logging_to(rundir.run_log):
            rundirs.write_text(rundir.config, loaded.text)
            _publish(prepared, rundir)
            result = _run_members(prepared, rundir, display)
            _write_predictions(prepared, rundir, result)
            failed = [state.failure for state in result.members if state.failure is not None]
            if not failed:
                _merge(prepared, rundir, result)
            _write_run_json(prepared, rundir, result, time.monotonic() - began)
            if failed:
                raise MembersFailed([failure_text(failure) for failure in failed])
            rundir.remove_work()
    return result


def _publish(prepared: Prepared, rundir: RunDir) -> None:
    with atomic_path(rundir.table) as temporary:
        prepared.table.publish(temporary)
    for member in prepared.plan.members:
        rundir.parts_dir(member.name).mkdir()
        with atomic_path(rundir.order(member.name)) as temporary, temporary.open("wb") as file:
            np.save(file, member.order)


def _run_members(prepared: Prepared, rundir: RunDir, display: Display) -> RunResult:
    def launch(member: MemberPlan, replica: int, lease: Sequence[Device]) -> tuple[Worker, str]:
        log_path = rundir.log(member.name, replica)
        worker = LocalWorker(worker_environment(lease), log_path)
        worker.send(Start.of(_worker_spec(prepared, rundir, member, replica)))
        return worker, shown_path(log_path)

    leases = Leases(prepared.inventory.gpus, prepared.config.release_timeout, display.say)
    scheduler = Scheduler(prepared.plan, leases, launch, display.update)
    display.start()
    try:
        return RunResult(scheduler.run(), leases)
    finally:
        display.stop()


def _worker_spec(prepared: Prepared, rundir: RunDir, member: MemberPlan, replica: int) -> WorkerSpec:
    model, checkpoint = member.model, prepared.checkpoints[member.name]
    return WorkerSpec(
        member=member.name,
        replica=replica,
        model_name_or_path=model.model_name_or_path,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        label_order=checkpoint.label_order,
        activation=checkpoint.activation,
        prompt_template=model.prompt_template,
        text_columns=text_columns(model),
        max_length=model.max_length,
        truncation_side=model.truncation_side,
        add_special_tokens=model.add_special_tokens,
        batch_size=None if model.batch_size == "auto" else model.batch_size,
        token_budget=model.max_num_batched_tokens,
        dtype=model.dtype,
        quantization_config=model.quantization_config,
        attn_implementation=model.attn_implementation,
        model_kwargs=model.model_kwargs,
        tokenizer_kwargs=model.tokenizer_kwargs,
        gpus=member.gpus,
        cpu_threads=_cpu_threads(member),
        seed=prepared.config.seed,
        table_path=str(rundir.table.resolve()),
        order_path=str(rundir.order(member.name).resolve()),
        parts_dir=str(rundir.parts_dir(member.name).resolve()),
    )


def _cpu_threads(member: MemberPlan) -> int | None:
    if member.gpus or member.replicas == 1:
        return None  # torch's own choice
    return max(1, len(os.sched_getaffinity(0)) // member.replicas)


def _write_predictions(prepared: Prepared, rundir: RunDir, result: RunResult) -> None:
    config = prepared.config
    for state in result.members:
        if not state.finished:
            continue
        parts_dir = rundir.parts_dir(state.plan.name)
        parts = [part_path(parts_dir, chunk.index) for chunk in state.plan.chunks]
        values = gather_parts(state.plan.name, parts, prepared.table.rows, len(config.labels))
        path = rundir.predictions(state.plan.name)
        _write_probabilities(path, prepared, values)
        result.files[f"predictions of {state.plan.name}"] = path


def _merge(prepared: Prepared, rundir: RunDir, result: RunResult) -> None:
    config, table = prepared.config, prepared.table
    scored = table.truth is not None and scores_make_sense(prepared.checkpoints)

    def members() -> Iterator[npt.NDArray[np.float64]]:
        for model in config.models:
            path = rundir.predictions(model.name)
            values = read_predictions(path, config.data.id_column, config.labels, table.ids)
            if scored and table.truth is not None:
                result.scores[model.name] = score(values, table.truth)
            yield values

    merged = weighted_mean([model.weight for model in config.models], members())
    if scored and table.truth is not None:
        result.scores[ENSEMBLE_ROW] = score(merged, table.truth)
    _write_probabilities(rundir.ensemble, prepared, merged)
    result.files["ensemble"] = rundir.ensemble
    _submit(prepared, rundir, result, merged)


def _write_probabilities(path: Path, prepared: Prepared, values: npt.NDArray[np.float64]) -> None:
    config = prepared.config
    columns = [pa.array(np.ascontiguousarray(values[:, label])) for label in range(values.shape[1])]
    with atomic_path(path) as temporary:
        write_csv(temporary, [config.data.id_column, *config.labels], [prepared.table.ids, *columns])


def _submit(prepared: Prepared, rundir: RunDir, result: RunResult, merged: npt.NDArray[np.float64]) -> None:
    config, sample = prepared.config, prepared.sample
    if config.submission is None or sample is None:
        return
    targets = [rundir.submission]
    # A trial on the first rows must not take the place of a real submission.
    if config.submission.path is not None and config.limit is None:
        config.submission.path.parent.mkdir(parents=True, exist_ok=True)
        targets.append(config.submission.path)
    for target in targets:
        with atomic_path(target) as temporary:
            write_submission(
                sample,
                prepared.table.ids,
                merged,
                config.labels,
                config.submission.columns,
                temporary,
                config.limit is not None,
            )
    result.files["submission"] = targets[-1]


def _write_run_json(prepared: Prepared, rundir: RunDir, result: RunResult, seconds: float) -> None:
    failed = any(state.failure for state in result.members)
    document = run_document(
        status="failed" if failed else "complete",
        config=prepared.config.model_dump(mode="json"),
        overrides=prepared.loaded.overrides,
        inventory=prepared.inventory,
        rows=prepared.table.rows,
        null_texts=prepared.table.null_texts,
        members=result.members,
        leases=result.leases,
        scores=result.scores,
        warnings=prepared.warnings,
        files=result.files,
        timing={"total_seconds": round(seconds, 3)},
    )
    write_run_json(rundir.run_json, document)
    result.files["report"] = rundir.run_json


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """While a run goes on, SIGINT, SIGTERM and SIGHUP end it through its own clean-up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _disk_errors_named(rundir: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = Path(error.filename) if error.filename else rundir.root
        raise OutputError(rundirs.cannot_write("output_dir", place, error)) from error


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
