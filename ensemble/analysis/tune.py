"""Try settings of every member, and write the fastest: ``tune``.

Each trial is a run of a member alone, over a sample of the table, in a folder below ``output_dir/tune``; it resumes
and ends like any run. Trials are kept there until all are done, so that an interrupted command goes on.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import yaml

from ensemble.commands.rehearse import sample_rows_of
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import digest_of
from ensemble.common.errors import ConfigError, DataError, EnsembleError, OutputError, WriteError
from ensemble.common.files import output_file, read_json, write_text
from ensemble.common.host import cpu_products, usable_cpus
from ensemble.common.packages import installed_versions, unsupported
from ensemble.common.protocol import Activation
from ensemble.common.text import duration, listed, plural, quoted
from ensemble.config import LoadedConfig, TuningConfig
from ensemble.config.document import path_of
from ensemble.data.table import InputTable
from ensemble.jobs.job import compile_models
from ensemble.members.base import Assigned, Candidate, Inspection, OutputColumns, RanWith
from ensemble.members.registry import member_kind
from ensemble.merging.metrics import METRICS, USUAL, LabelledRows, decisions
from ensemble.merging.scoring import Bootstrap, Interval
from ensemble.pipeline.load import derived_run, load
from ensemble.pipeline.prediction_files import read_as_written
from ensemble.pipeline.prepare import for_rows, prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import Display, run_prepared
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.run_report import MemberProgress, MemberReport, RunReport
from ensemble.pipeline.signals import heed_signals
from ensemble.scheduling.launchers.base import make_launcher

# The reference took so many times as long at the end, or the inverse: speeds say little, or nothing.
_NOISY = 1.25
_MOVED = 2.0
# The mean over rows of the largest difference of a probability; docs/how-to/faster.md says why.
TOLERANCE = 0.02
_MARKER = ".tune.json"  # no member has such a name
# Keys of a config that trials do not take.
_NOT_TAKEN = {"ensemble", "rules", "submission", "output_dir", "report", "retries", "on_member_failure"}
_NOT_TAKEN |= {"time_limit", "tuned_on", "copy_to", "report_to"}
_ROWS = 256
# A candidate is stopped when it has computed for this many times the seconds of the best trial.
_TOO_SLOW = 2.0
_MIN_SECONDS = 3.0
# Keys that change a member's fingerprint whenever they change its numbers.
_OF_NUMBERS = ("dtype", "quantization_config", "attn_implementation")


@dataclass(frozen=True)
class Trial:
    """Hold settings that were tried: ``keys`` of the member, as in the YAML.

    Attributes:
        is_precision: whether it is of the first group, which changes numbers most.
        failure: why there is no result, in a sentence; empty if there is one.
        seconds: for computing the sample.
        load_seconds: of the checkpoint, without the start of Python.
        whole_seconds: about, for loading and for computing the whole table.
        peak_bytes: of the worker's process on a CPU, else of the GPU.
        mean, largest, changed: see ``distances``, from the reference; ``metrics`` are minus those of the reference.
        is_within: whether it is as near to the reference as was asked for.
        lacking: rows of the sample that could not be computed and are left out here; ``why_lacking`` says why.
    """

    name: str
    keys: Mapping[str, Any]
    is_precision: bool = False
    failure: str = ""
    seconds: float | None = None
    load_seconds: float | None = None
    whole_seconds: float | None = None
    tokens_per_second: float | None = None
    rows_per_second: float | None = None
    peak_bytes: int | None = None
    mean: float = 0.0
    largest: float = 0.0
    changed: float = 0.0
    metrics: Mapping[str, Interval] = field(default_factory=dict)
    ran_with: RanWith = field(default_factory=RanWith)
    is_within: bool = False
    lacking: int = 0
    why_lacking: str = ""
    values: npt.NDArray[np.float64] | None = field(default=None, repr=False, compare=False)

    @property
    def cost(self) -> float:
        return float("inf") if self.whole_seconds is None else self.whole_seconds


@dataclass(frozen=True)
class MemberTuning:
    """Hold the trials of a member.

    Attributes:
        reference: the name of the trial that the others are compared with; empty if none gave a result.
        best: the name of the fastest within the tolerance; empty if nothing was chosen.
        keys: to change in the config; None removes a key.
        again: the reference's time at the end divided by its time at first; None if it was not measured.
    """

    name: str
    trials: tuple[Trial, ...]
    reference: str = ""
    best: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    again: float | None = None

    @property
    def lost_references(self) -> tuple[str, ...]:
        """Return the trials that would have been the reference if they had given a result, the widest first."""
        names = (trial.name for trial in self.trials)
        return tuple(takewhile(lambda name: name != self.reference, names)) if self.reference else ()

    @property
    def has_moved(self) -> bool:
        """Return whether the machine's speed changed so much that nothing can be chosen."""
        return self.again is not None and not 1 / _MOVED <= self.again <= _MOVED

    @property
    def is_noisy(self) -> bool:
        """Return whether the machine's speed changed so much that speeds say little."""
        return self.again is not None and not 1 / _NOISY <= self.again <= _NOISY


@dataclass(frozen=True)
class Tuning:
    """Hold the trials of all members; ``skipped`` have no settings to choose, and all of it took ``seconds``."""

    members: tuple[MemberTuning, ...]
    skipped: tuple[str, ...]
    rows: int
    tolerance: float
    seconds: float
    tuned_on: TuningConfig

    @property
    def has_result(self) -> bool:
        """Return whether settings were chosen for any member."""
        return any(member.best for member in self.members)

    def overlay(self) -> str:
        """Return the YAML to give after the config's own files."""
        models = [{"name": member.name, **member.keys} for member in self.members if member.keys]
        document: dict[str, Any] = {"models": models} if models else {}
        document["tuned_on"] = self.tuned_on.model_dump(mode="json", exclude_none=True)
        lines = [
            f"# By `ensemble tune` on {self.tuned_on.date}: the fastest settings that change a row's",
            f"# probabilities by {self.tolerance:g} or less, in the mean over {plural(self.rows, 'row')}.",
            "# It takes effect as the last of the files in `ensemble run CONFIG THIS_FILE`.",
        ]
        for member in self.members:
            how = member.best or "nothing tried gave a result"
            if member.best:
                is_reference = member.best == member.reference
                how += ", the reference itself" if is_reference else f", compared with {member.reference}"
            if member.has_moved:
                how = f"nothing chosen, as the reference took {member.again:.2g} times as long at the end"
            if member.is_noisy:
                how += "; while speeds changed, so measure again"
            lines.append(f"# {member.name}: {how}")
        return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)])


class _TooSlow(Exception):
    """End the run of a trial that is too slow; the argument is the rows per second that it reached."""


class _Watching:
    """Show nothing, and end a trial that computes for more than ``max_seconds``."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds

    def say(self, text: str) -> None: ...

    def update(self, members: Sequence[MemberProgress]) -> None:
        (member,) = members
        if member.seconds is not None and member.phase != "done" and member.seconds > self._max_seconds:
            raise _TooSlow((member.rows_done - member.reused_rows) / member.seconds)

    def stop(self) -> None: ...


class MemberTrials:
    """Run a member's trials over the same sample, which has rows of all lengths."""

    def __init__(
        self,
        prepared: Prepared,
        index: int,
        rows: int | None,
        folder: Path,
        tolerance: float,
        say: Callable[[str], None],
        owns_process: bool,
    ) -> None:
        self.model = prepared.config.models[index]
        self._prepared = prepared
        self._index = index
        self._chosen = sample_rows_of(prepared.table.text_bytes, rows or _ROWS)
        self._folder = folder
        self._tolerance = tolerance
        self._say = say
        self._owns_process = owns_process
        self._trials: list[Trial] = []
        self._reference: Trial | None = None
        self._best: Trial | None = None
        gpus, num_gpus = prepared.plan.gpus, member_kind(self.model).request().num_gpus
        self._on_gpu = bool(gpus) and num_gpus != 0
        capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
        self._assigned = Assigned(
            gpus=(num_gpus or 1) if self._on_gpu else 0,
            capability=min(capabilities, default=None) if self._on_gpu else None,
        )
        groups = [[*group] for group in self._candidates()]
        # The largest number of trials, counting the reference twice; 0 if there is nothing to choose.
        self.count = 0
        if any(groups):
            # The config's precision is tried, too.
            configured = self._identity({})
            if configured not in [None, *(self._identity(candidate.keys) for candidate in groups[0])]:
                groups[0].append(Candidate("as configured", {}))
            self.count = sum(map(len, groups)) + 1
        self._precisions = groups[0] if groups else []

    @property
    def rows(self) -> int:
        return len(self._chosen)

    def expected_seconds(self) -> float:
        """Return the expected time of the trials that are left, measured or guessed; 0 if it is unknown."""
        planned = [model for model in self._prepared.plan.models if model.member == self.model.name]
        share = self.rows / max(1, self._prepared.table.rows)
        trial_seconds = sum(model.speed.startup_seconds + model.whole_seconds * share for model in planned)
        return trial_seconds * max(0, self.count - self.kept)

    @property
    def kept(self) -> int:
        """Return the number of trials that an interrupted command has finished."""
        return sum(map(_is_complete, self._folder.glob("*-*")))

    def tune(self) -> MemberTuning:
        """Try each group of candidates with the best earlier settings, and then the reference again."""
        name = self.model.name
        for candidate in self._precisions:
            self._try(candidate.name, dict(candidate.keys), is_precision=True)
        reference = self._reference
        if self._best is None or reference is None or reference.seconds is None:
            self._say(f"{name}: no trial gave a result; the settings stay as they are")
            return MemberTuning(name, tuple(self._trials))
        for group in range(1, len(self._candidates())):
            best = self._best
            for candidate in self._candidates(best.ran_with)[group]:
                computing = (best.whole_seconds or 0.0) - (best.load_seconds or 0.0)
                if computing < candidate.pays_from_seconds:
                    self._say(
                        f"{name}: {candidate.name}: not tried: all rows take "
                        f"{duration(computing)}, and it pays only from {duration(candidate.pays_from_seconds)} on"
                    )
                else:
                    self._try(f"{best.name}, {candidate.name}", {**best.keys, **candidate.keys})
        last = self._run(Trial(f"{reference.name}, again", reference.keys), None)
        ratio = None if last.seconds is None else last.seconds / reference.seconds
        tuning = MemberTuning(name, tuple(self._trials), reference.name, again=ratio)
        if tuning.has_moved:
            return tuning
        return replace(tuning, best=self._best.name, keys=self._changes(self._best.keys))

    def _candidates(self, ran_with: RanWith | None = None) -> Sequence[Sequence[Candidate]]:
        first = next(model for model in self._prepared.models if model.member == self.model.name)
        return first.kind.candidates(self._prepared.of_models[first.name], self._assigned, ran_with)

    def _identity(self, keys: Mapping[str, Any]) -> str | None:
        """Return a digest of all that the member's numbers depend on with these keys; None if it cannot run."""
        try:
            prepared = self._prepare(keys, self._sample(), self._folder)
        except EnsembleError:
            return None
        fingerprints = [
            dict(plan.loaded.kind.fingerprint(prepared.of_models[plan.name], plan.placement))
            for plan in prepared.plan.models
        ]
        return digest_of(fingerprints)

    def _changes(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys whose values differ from the config's."""
        is_same = self._identity(keys) == self._identity({})
        changed = {}
        for key, value in keys.items():
            field_info = type(self.model).model_fields[key]
            new_value = field_info.get_default(call_default_factory=True) if value is None else value
            if new_value != getattr(self.model, key) and not (is_same and key in _OF_NUMBERS):
                changed[key] = value
        return changed

    def _sample(self) -> InputTable:
        """Return the sample as a new table, because each run drops the columns of its table."""
        ids = self._prepared.table.ids.take(pa.array(self._chosen))
        return self._prepared.table.derived(self._chosen, ids)

    def _try(self, name: str, keys: dict[str, Any], is_precision: bool = False) -> None:
        """Run a candidate; the first candidate with a result becomes the reference."""
        best = self._best
        trial = self._run(Trial(name, keys, is_precision), None if best is None else best.seconds)
        text = trial.failure
        if not text:
            if self._reference is None or best is None:
                trial = replace(trial, is_within=True)
                self._reference = self._best = trial
                distance = "the reference"
            else:
                trial = self._compared(trial, self._reference)
                # A smaller gain may be noise.
                if trial.is_within and trial.cost < 0.95 * best.cost:
                    self._best = trial
                distance = f"{trial.mean:.4f} from {self._reference.name}"
            unit = "tokens/s" if trial.tokens_per_second else "rows/s"
            text = f"{trial.tokens_per_second or trial.rows_per_second or 0.0:,.0f} {unit}, {distance}"
        self._trials.append(trial)
        self._say(f"{self.model.name}: {name}: {text}")

    def _compared(self, trial: Trial, reference: Trial) -> Trial:
        """Return a trial with its distance from the reference, over the rows that both could compute."""
        assert trial.values is not None
        assert reference.values is not None
        activation = self._prepared.inspected[self.model.name].activation
        in_both = np.isfinite(reference.values).all(axis=1) & np.isfinite(trial.values).all(axis=1)
        expected, values = reference.values[in_both], trial.values[in_both]
        post = self._prepared.post.taken(self._chosen[in_both])
        for of_trial in (expected, values):  # what counts are the values that would be merged
            post.member(0, of_trial, activation)
        mean, largest, changed = distances(expected, values, activation)
        known = self._prepared.labelled
        metrics: dict[str, Interval] = {}
        if known is not None:
            known = replace(known.taken(self._chosen[in_both]), activation=activation)
            metrics = _metric_differences(expected, values, known)
        return replace(
            trial,
            mean=mean,
            largest=largest,
            changed=changed,
            metrics=metrics,
            is_within=mean <= self._tolerance and (activation == "none" or changed <= self._tolerance),
        )

    def _prepare(
        self, keys: Mapping[str, Any], table: InputTable, folder: Path, is_whole: bool = False
    ) -> Prepared:
        """Prepare a run of this member alone, with these keys; raise EnsembleError if it cannot run.

        With ``is_whole`` the member may have a replica on each GPU, as in a run of the whole table.
        """
        loaded = self._prepared.loaded
        overrides = [f"models.{self._index}.{key}={json.dumps(value)}" for key, value in keys.items()]
        changed = load(loaded.sources, [*loaded.overrides, *overrides], texts=loaded.texts)
        model = changed.config.models[self._index]
        if self._on_gpu and not is_whole and getattr(model, "replicas", 1) == "auto":
            model = model.model_copy(update={"replicas": 1})  # more would only load the same weights again
        workers = loaded.config.cpu_workers
        derived = derived_run(
            loaded,
            [model],
            folder,
            time_limit=None,
            report=False,
            retries=0,
            on_member_failure="fail",
            cpu_workers=1 if self._on_gpu or workers == "auto" else workers,
            tuned_on=None,
        )
        config = derived.config
        problems: list[str] = []
        columns = OutputColumns.of(config.data, config.labels)
        inspected: dict[str, Inspection] = {}
        for loads in compile_models(config.models, config.labels):
            inspected[loads.name] = loads.kind.inspect(columns)
            problems += loads.kind.problems(inspected[loads.name])
            problems += unsupported((), dict(loads.kind.packages(inspected[loads.name])))
        if problems:
            raise ConfigError(problems)
        return replace(
            for_rows(replace(self._prepared, of_models=inspected), derived, table),
            warnings=(),
            launcher=make_launcher(config.launcher, config.hang_timeout),
        )

    def _run(self, trial: Trial, best_seconds: float | None) -> Trial:
        """Run a trial; its ``failure`` says what went wrong."""
        table = self._sample()
        slug = "".join(letter if letter.isalnum() else "-" for letter in trial.name)
        folder = self._folder / f"{slug}-{table.rows}"
        max_seconds = float("inf") if best_seconds is None else max(_MIN_SECONDS, _TOO_SLOW * best_seconds)
        try:
            prepared = self._prepare(trial.keys, table, folder)
            report = run_prepared(
                prepared,
                _Watching(max_seconds),
                not _is_complete(folder),
                boot_seconds(),
                owns_process=self._owns_process,
            )
        except _TooSlow as error:
            (speed,) = error.args
            why = f"stopped at {speed:.3g} rows/s: it takes more than twice as long as the best so far"
            return replace(trial, failure=why, rows_per_second=speed)
        except WriteError:
            raise
        except EnsembleError as error:
            return replace(trial, failure=error.problems[0])
        (member,) = report.members
        if member.bad_rows and member.rows_done == table.rows and report.status != "complete":
            return replace(trial, failure=_bad_rows(member, table))
        if member.failure is not None or report.status != "complete":
            message = f"the run is {report.status}" if member.failure is None else member.failure.message
            return replace(trial, failure=message)
        return self._measured(trial, prepared, member)

    def _measured(self, trial: Trial, prepared: Prepared, member: MemberReport) -> Trial:
        values = read_as_written(RunDir(prepared.config.output_dir).predictions(member.name)).values
        # The file may have equal probabilities in bad rows.
        values[[int(row) for row in member.bad_rows]] = np.nan
        lacking = int((~np.isfinite(values).all(axis=1)).sum())
        why = _bad_rows(member, prepared.table) if lacking else ""
        # Rows that no settings can compute, for example with missing images, do not count against a candidate.
        allowed = len(values) - 1 if self._reference is None else self._reference.lacking
        if lacking > allowed:
            return replace(trial, failure=why)
        # Not of a worker that died before it was ready; another one did its rows then.
        ready = next((worker.ready for worker in member.workers if worker.ready is not None), None)
        busy_seconds = max((worker.counters.predict_seconds for worker in member.workers), default=0.0)
        rows, tokens = member.worker_counters.rows, member.worker_counters.tokens
        if ready is None or not rows or not busy_seconds:
            return replace(trial, failure="nothing was measured: the run has no times of its workers")
        seconds = busy_seconds * prepared.table.rows / rows
        load_seconds = ready.load_seconds
        work = sum(model.work for model in prepared.plan.models)
        whole_work, replicas = self._whole(trial, prepared)
        return replace(
            trial,
            seconds=seconds,
            load_seconds=load_seconds,
            whole_seconds=load_seconds + seconds * whole_work / max(work, 1e-9) / replicas,
            tokens_per_second=tokens / busy_seconds if tokens else None,
            rows_per_second=rows / busy_seconds,
            peak_bytes=member.peak("peak_gpu_memory_bytes") or member.peak("peak_memory_bytes") or None,
            ran_with=RanWith(ready.dtype, ready.attn_implementation, ready.token_budget, tokens),
            values=values,
            lacking=lacking,
            why_lacking=why,
        )

    def _whole(self, trial: Trial, prepared: Prepared) -> tuple[float, int]:
        """Return the work of the whole table, and how many replicas would share it on GPUs.

        If the whole table does not fit with these settings, return the work of the sample.
        """
        with contextlib.suppress(EnsembleError):
            folder = prepared.config.output_dir
            prepared = self._prepare(trial.keys, self._prepared.table, folder, is_whole=True)
        models = prepared.plan.models
        return sum(model.work for model in models), models[0].replicas if self._on_gpu else 1


def _is_complete(run_dir: Path) -> bool:
    """Return whether a trial was finished; the remaining rows of an unfinished trial do not show its speed."""
    try:
        return RunReport.read(RunDir(run_dir).run_json).status == "complete"
    except DataError:
        return False


def _bad_rows(member: MemberReport, table: InputTable) -> str:
    """Return a sentence about the rows of a trial's table that could not be computed."""
    if not member.bad_rows:
        return "some values are not numbers"
    row, reason = next(iter(member.bad_rows.items()))
    where = f"the first of them with id {quoted(str(table.ids[int(row)].as_py()))}"
    count = f"{len(member.bad_rows):,} of {plural(table.rows, 'row')} of the sample"
    return f"{count} could not be computed, {where}: {reason}"


def distances(
    expected: npt.NDArray[np.float64], values: npt.NDArray[np.float64], activation: Activation
) -> tuple[float, float, float]:
    """Return the mean and the largest distance between rows, [rows, labels], and the share of changed labels.

    A row's distance is the largest difference between its values. For activation "none" differences are in standard
    deviations of the expected values, and no label changes.
    """
    differences = np.abs(values - expected)
    if activation == "none":
        spread = expected.std(axis=0)
        differences = differences / np.where(spread > 0, spread, 1.0)
        changed = np.zeros(len(values), np.bool_)
    else:
        changed = (decisions(values, activation) != decisions(expected, activation)).any(axis=1)
    by_row = differences.max(axis=1)
    return float(by_row.mean()), float(by_row.max()), float(changed.mean())


def _metric_differences(
    expected: npt.NDArray[np.float64], values: npt.NDArray[np.float64], known: LabelledRows
) -> dict[str, Interval]:
    bootstrap = Bootstrap(known)
    differences = {}
    for name in USUAL[known.activation]:
        with contextlib.suppress(DataError):  # for example AUC if all rows have the same label
            reference = bootstrap.score(METRICS[name], expected)
            differences[name] = bootstrap.score(METRICS[name], values).minus(reference)
    return differences


def tune(
    loaded: LoadedConfig,
    display: Display,
    rows: int | None = None,
    tolerance: float | None = None,
    target: Path | None = None,
    owns_process: bool = True,
) -> Tuning:
    """Try settings of every member that has any to choose, and write the overlay to ``target``; see ``api.tune``.

    Raises:
        EnsembleError: a run of the config could not start, another ``tune`` uses the folder, or the disk is full.
        Interrupted: a signal came; the same command goes on.
    """
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < float("inf"):
        raise ConfigError(
            f"--tolerance: {tolerance} is no number of at least 0; {TOLERANCE:g} is the usual one"
        )
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows: {rows} is no number of rows; give at least 1")
    began = boot_seconds()
    prepared = prepare(loaded, must_fit=False)
    config, gpus = loaded.config, prepared.plan.gpus
    rundir = RunDir(config.output_dir)
    if target is not None:
        samples = [] if config.submission is None else [config.submission.sample]
        output_file(target, [config.data.path, *samples, *map(Path, prepared.file_states)])
        rundir.demand_free("--write", target)
    members = [
        MemberTrials(
            prepared, index, rows, rundir.tune_dir / model.name, tolerance, display.say, owns_process
        )
        for index, model in enumerate(config.models)
        if member_kind(model).needs_worker
    ]
    tunable = [member for member in members if member.count]
    names = [member.model.name for member in tunable]
    if not tunable:
        raise ConfigError(
            "models: no member has settings that tune could choose; it is for checkpoints that transformers loads"
        )
    devices = [device.name for device in gpus or prepared.inventory.hosts] or [cpu_products()]
    versions = installed_versions(("torch", "transformers"))
    made_of = digest_of(
        {
            "config": config.model_dump(mode="json", exclude=_NOT_TAKEN),
            "table": repr(prepared.table_state),
            "devices": sorted(devices),
            "versions": versions,
            "cores": usable_cpus(),
            "rows": rows,
        }
    )
    sample_rows = tunable[0].rows
    folder = RunDir(rundir.tune_dir)
    folder.create()
    with hold(folder), heed_signals(owns_process):
        marker = {"made_of": made_of, "members": names}
        _begin(folder.root, marker)
        kept = sum(member.kept for member in tunable)
        seconds = [member.expected_seconds() for member in tunable]
        about = f", about {duration(sum(seconds))}" if all(seconds) else ""
        about += f" ({kept} done already)" if kept else ""
        display.say(
            f"{plural(sum(member.count for member in tunable), 'trial')} at most, each in a fresh worker, of "
            f"{sample_rows:,} of {plural(prepared.table.rows, 'row')}{about}; what is done is kept in {folder.root}"
        )
        tuning = Tuning(
            members=tuple(member.tune() for member in tunable),
            skipped=tuple(model.name for model in config.models if model.name not in names),
            rows=sample_rows,
            tolerance=tolerance,
            seconds=boot_seconds() - began,
            tuned_on=TuningConfig.model_validate(
                {
                    "versions": versions,
                    "rows": sample_rows,
                    "devices": [*dict.fromkeys(devices)],
                    "tolerance": tolerance,
                    "date": datetime.now(UTC).date().isoformat(),
                }
            ),
        )
        # First, so that the same command goes on with these trials if the file cannot be written.
        if target is not None and tuning.has_result:
            write_text(target, tuning.overlay())
        write_text(folder.root / _MARKER, json.dumps({**marker, "complete": True}) + "\n")
    return tuning


def overrides_beside(loaded: LoadedConfig, tuning: Tuning) -> list[str]:
    """Return the config's overrides of keys that the overlay does not set, as overrides would come last."""
    keys_of = {member.name: member.keys for member in tuning.members}
    tuned = {
        f"models.{name}.{key}."
        for index, model in enumerate(loaded.config.models)
        for key in keys_of.get(model.name, ())
        for name in (index, model.name)
    }
    return [override for override in loaded.overrides if not f"{path_of(override)}.".startswith(tuple(tuned))]


def _begin(folder: Path, marker: Mapping[str, Any]) -> None:
    """Keep the trials of an interrupted ``tune`` of the same config, table and versions; remove others."""
    others = [path for path in folder.iterdir() if path.name not in (".lock", _MARKER)]
    before = read_json(folder / _MARKER)
    if others and not (folder / _MARKER).exists():
        raise OutputError(
            f"{folder}: holds {listed([path.name for path in others])}, which tune has not made; choose "
            "another output_dir"
        )
    if before != marker:
        for path in others:
            if path.name in (*marker["members"], *before.get("members", ())):
                shutil.rmtree(path, ignore_errors=True)
    write_text(folder / _MARKER, json.dumps(marker) + "\n")
