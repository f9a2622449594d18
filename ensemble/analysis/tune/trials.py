"""One member's trials: each is a run of it alone over a sample of the table.

It has a folder of its own below ``output_dir/tune``.  What ends it, resumes it and measures it is what does so for
every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.analysis.metrics import METRICS, USUAL, Bootstrap
from ensemble.analysis.tune.tuning import MemberTuning, MetricDifference, Trial
from ensemble.commands.rehearse import sample_rows_of
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import digest_of
from ensemble.common.errors import ConfigError, DataError, EnsembleError, WriteError
from ensemble.common.packages import unsupported
from ensemble.common.protocol import Activation
from ensemble.common.text import duration, plural, quoted
from ensemble.config import EnsembleConfig, MemberConfig
from ensemble.data.table import InputTable, Truth
from ensemble.members.base import Assigned, Candidate, MemberKind, OutputColumns, RanWith
from ensemble.members.registry import member_kind
from ensemble.pipeline.load import load
from ensemble.pipeline.prediction_files import read_as_written
from ensemble.pipeline.prepare import for_rows
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import run_prepared
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import MemberReport, RunReport
from ensemble.scheduling.launchers.base import make_launcher
from ensemble.scheduling.state import MemberState

_ROWS = 256
# A candidate that has computed for so many times as long as the best took for the same rows is stopped.
_TOO_SLOW = 2.0
_MIN_SECONDS = 3.0
# A further setting is taken where it saves so much of the time: less is noise.
_WORTH_CHANGING = 0.95


class _TooSlow(Exception):
    """Ends a trial's run from within."""


class _Watching:
    """The display of a trial: shows nothing, and ends it once it has computed for longer than it may."""

    def __init__(self, max_seconds: float | None) -> None:
        self._max_seconds = max_seconds
        self.rows_per_second = 0.0

    def say(self, text: str) -> None: ...

    def update(self, members: Sequence[MemberState]) -> None:
        (state,) = members
        if self._max_seconds is None or state.predicting_since is None or state.finished:
            return
        if state.predicting_seconds > self._max_seconds:
            self.rows_per_second = (state.rows_done - state.reused_rows) / state.predicting_seconds
            raise _TooSlow

    def stop(self) -> None: ...


class MemberTrials:
    """One member's trials, each over the same sample of rows of every length."""

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
        self._owns_process = owns_process
        self._prepared = prepared
        self._index = index
        self._chosen = sample_rows_of(prepared.table.text_bytes, rows or _ROWS)
        self._truth = None if prepared.truth is None else prepared.truth[self._chosen]
        self._folder = folder
        self._tolerance = tolerance
        self._say = say
        self.model: MemberConfig = prepared.config.models[index]
        self._kind: MemberKind[Any, Any] = member_kind(self.model)
        self._trials: list[Trial] = []
        self._reference: Trial | None = None
        self._best: Trial | None = None
        request, gpus = self._kind.request(), prepared.plan.gpus
        self._on_gpu = bool(gpus) and request.num_gpus != 0
        capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
        self._assigned = Assigned(
            gpus=(request.num_gpus or 1) if self._on_gpu else 0,
            capability=min(capabilities, default=None) if self._on_gpu else None,
        )

    @property
    def rows(self) -> int:
        """Number of rows of the sample."""
        return len(self._chosen)

    @cached_property
    def count(self) -> int:
        """How many trials there are at most, the reference again among them; 0: there is nothing to choose."""
        groups = self._kind.candidates(self._prepared.inspected[self.model.name], self._assigned)
        if not any(groups):
            return 0
        precisions, *others = groups
        return len([*self._with_own(precisions)]) + sum(map(len, others)) + 1

    @property
    def kept(self) -> int:
        """How many trials an interrupted command has finished."""
        return sum(map(_is_complete, self._folder.glob("*-*")))

    def expected_seconds(self) -> float:
        """Of all of them, by the speed of an earlier run or by a guess; 0 where nobody knows."""
        planned = [member for member in self._prepared.plan.members if member.name == self.model.name]
        share = self.rows / max(1, self._prepared.table.rows)
        return sum(
            self.count * (member.speed.startup_seconds + member.whole_seconds * share) for member in planned
        )

    def tune(self) -> MemberTuning:
        """Try each group of candidates with the best of the groups before it, and then the reference again."""
        name, inspected = self.model.name, self._prepared.inspected[self.model.name]
        (precisions, *_) = self._kind.candidates(inspected, self._assigned)
        for candidate in self._with_own(precisions):
            self._try(candidate.name, dict(candidate.keys), is_precision=True)
        best, reference = self._best, self._reference
        if best is None or reference is None or reference.seconds is None:
            self._say(f"{name}: nothing that was tried gave a result; its settings stay as they are")
            return MemberTuning(name, tuple(self._trials))
        group = 1
        while group < len(groups := self._kind.candidates(inspected, self._assigned, best.ran_with)):
            for candidate in groups[group]:
                computing = (best.whole_seconds or 0.0) - (best.load_seconds or 0.0)
                if computing < candidate.pays_from_seconds:
                    self._say(
                        f"{name}: {candidate.name}: not tried, as all rows are computed in "
                        f"{duration(computing)}, and it can pay from {duration(candidate.pays_from_seconds)} on"
                    )
                    continue
                self._try(f"{best.name}, {candidate.name}", {**best.keys, **candidate.keys})
            best, group = self._best or best, group + 1
        last = self._run(Trial(f"{reference.name}, again", reference.keys), None)
        again = None if last.seconds is None else last.seconds / reference.seconds
        tuning = MemberTuning(name, tuple(self._trials), reference.name, again=again)
        if tuning.has_moved:
            return tuning
        return replace(tuning, best=best.name, keys=self._changes(best.keys))

    def _with_own(self, precisions: Sequence[Candidate]) -> Iterator[Candidate]:
        """The precisions, and behind them the config's own where that is none of them."""
        yield from precisions
        configured = self._identity({})
        if configured is not None and all(
            self._identity(candidate.keys) != configured for candidate in precisions
        ):
            yield Candidate("as configured", {})

    def _identity(self, keys: Mapping[str, Any]) -> str | None:
        """What its numbers depend on with these settings; None where they cannot be had."""
        try:
            prepared = self._made(keys, self._sample(), self._folder)
        except EnsembleError:
            return None
        model, (plan,) = prepared.config.models[0], prepared.plan.members
        inspected = prepared.inspected[model.name]
        return digest_of(dict(member_kind(model).fingerprint(inspected, plan.placement)))

    def _changes(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the keys that the config has otherwise; none that make no difference."""
        changed = {}
        for key, value in keys.items():
            field_info = type(self.model).model_fields[key]
            new_value = field_info.get_default(call_default_factory=True) if value is None else value
            if new_value != getattr(self.model, key):
                changed[key] = value
        configured = self._identity({})
        for key in list(changed):
            rest = {name: value for name, value in changed.items() if name != key}
            is_idle = configured is not None and key in (
                "dtype",
                "quantization_config",
                "attn_implementation",
            )
            if is_idle and self._identity(rest) == self._identity(changed):
                del changed[key]
        return changed

    def _sample(self) -> InputTable:
        """Return a new table of the sample, as a run forgets its columns once the workers have them."""
        ids = self._prepared.table.ids.take(pa.array(self._chosen))
        return self._prepared.table.derived(self._chosen, ids)

    def _try(self, name: str, keys: dict[str, Any], is_precision: bool = False) -> None:
        """Run a candidate; the first one that gives a result is the reference."""
        best, reference = self._best, self._reference
        trial = self._run(Trial(name, keys, is_precision), None if best is None else best.seconds)
        if not trial.failure and (best is None or reference is None):
            trial = replace(trial, is_within=True)
            self._reference = self._best = trial
        elif not trial.failure and best is not None and reference is not None:
            trial = self._compared(trial, reference)
            if trial.is_within and _cost(trial) < _WORTH_CHANGING * _cost(best):
                self._best = trial
        self._add(trial)

    def _compared(self, trial: Trial, reference: Trial) -> Trial:
        """Return a trial with its distance from the reference."""
        assert trial.values is not None
        assert reference.values is not None
        kind = self._prepared.inspected[self.model.name].activation
        both = np.isfinite(reference.values).all(axis=1) & np.isfinite(trial.values).all(axis=1)
        expected, values = reference.values[both], trial.values[both]
        mean, largest, changed = distances(expected, values, kind)
        metrics: tuple[MetricDifference, ...] = ()
        if self._truth is not None:
            metrics = tuple(_metric_differences(expected, values, self._truth[both], kind))
        is_within = mean <= self._tolerance and (kind == "none" or changed <= self._tolerance)
        return replace(
            trial, mean=mean, largest=largest, changed=changed, metrics=metrics, is_within=is_within
        )

    def _add(self, trial: Trial) -> None:
        self._trials.append(trial)
        said = trial.failure
        if not said:
            speed = trial.tokens_per_second or trial.rows_per_second or 0.0
            unit = "tokens/s" if trial.tokens_per_second else "rows/s"
            said = f"{speed:,.0f} {unit}"
            if trial.name != (self._reference.name if self._reference else ""):
                said += f", {trial.mean:.4f} from {self._reference.name if self._reference else ''}"
            else:
                said += ", the reference"
        self._say(f"{self.model.name}: {trial.name}: {said}")

    def _made(
        self,
        keys: Mapping[str, Any],
        table: InputTable,
        folder: Path,
        is_whole: bool = False,
    ) -> Prepared:
        """A run of this member alone, with these keys.

        Args:
            is_whole: it may have a replica on each GPU, as the run that takes the settings.

        Raises:
            EnsembleError: it cannot be so, or does not fit.
        """
        loaded = self._prepared.loaded
        sets = [f"models.{self._index}.{key}={json.dumps(value)}" for key, value in keys.items()]
        config = load(loaded.sources, [*loaded.overrides, *sets], texts=loaded.texts).config
        model, changes = config.models[self._index], dict[str, Any](weight=1.0, when=None)
        if self._on_gpu and not is_whole and getattr(model, "replicas", 1) == "auto":
            changes["replicas"] = 1  # they would only load the same several times
        model = model.model_copy(update=changes)
        kind = member_kind(model)
        inspected = kind.inspect(OutputColumns(config.data.id_column, config.labels, config.data.path.parent))
        problems = [*kind.problems(inspected, bool(self._prepared.plan.gpus))]
        problems += unsupported((), dict(kind.packages(inspected)))
        if problems:
            raise ConfigError(problems)
        keys_of_run: dict[str, object] = {
            "models": (model,),
            "ensemble": EnsembleConfig(),
            "rules": None,
            "submission": None,
            "time_limit": None,
            "limit": None,
            "output_dir": folder,
            "report": False,
            "retries": 0,
            "on_member_failure": "fail",
            "cpu_workers": 1 if self._on_gpu or config.cpu_workers == "auto" else config.cpu_workers,
            "tuned_on": None,
        }
        whole = replace(self._prepared, inspected={model.name: inspected})
        return replace(
            for_rows(whole, replace(loaded, config=config.model_copy(update=keys_of_run)), table),
            warnings=(),
            launcher=make_launcher(config.launcher, config.hang_timeout),
        )

    def _run(self, trial: Trial, best_seconds: float | None) -> Trial:
        """Run a trial; whatever goes wrong with it is in its ``failure``."""
        table = self._sample()
        slug = "".join(letter if letter.isalnum() else "-" for letter in trial.name)
        folder = self._folder / f"{slug}-{table.rows}"
        limit = None if best_seconds is None else max(_MIN_SECONDS, _TOO_SLOW * best_seconds)
        watching = _Watching(limit)
        trial = replace(trial, rows=table.rows)
        try:
            prepared = self._made(trial.keys, table, folder)
            is_done = _is_complete(folder)
            report = run_prepared(
                prepared, watching, not is_done, boot_seconds(), owns_process=self._owns_process
            )
        except _TooSlow:
            speed = watching.rows_per_second
            said = f"stopped at {speed:.3g} rows/s" if speed else "stopped"
            said += ", as it takes more than twice as long as the best so far"
            return replace(trial, failure=said, rows_per_second=speed)
        except WriteError:
            raise
        except EnsembleError as error:
            return replace(trial, failure=error.problems[0])
        (member,) = report.members
        if member.failure is not None or report.status != "complete":
            message = member.failure.message if member.failure is not None else f"the run is {report.status}"
            if member.bad_rows and member.progress.rows_done == table.rows:  # that is why
                message = _bad_rows(member, table)
            return replace(trial, failure=message)
        return self._measured(trial, prepared, report, member)

    def _measured(self, trial: Trial, prepared: Prepared, report: RunReport, member: MemberReport) -> Trial:
        values = read_as_written(RunDir(prepared.config.output_dir).predictions(member.name)).values
        # Rows that nobody can compute, such as of images that are not there, speak against no candidate.
        values[[int(row) for row in member.bad_rows]] = (
            np.nan
        )  # of which the file may have even probabilities
        lacking = int((~np.isfinite(values).all(axis=1)).sum())
        allowed = len(values) - 1 if self._reference is None else self._reference.lacking
        why = _bad_rows(member, prepared.table) if lacking else ""
        if lacking > allowed:
            return replace(trial, failure=why)
        first = member.workers[0]
        busy = max((worker.predict_seconds for worker in member.workers), default=0.0)
        rows, tokens = (
            sum(getattr(worker, name) for worker in member.workers) for name in ("rows", "tokens")
        )
        if not rows or not busy:
            return replace(trial, failure="nothing was measured: its run says of no worker how long it took")
        on_gpu = [
            worker.peak_gpu_memory_bytes
            for worker in member.workers
            if worker.peak_gpu_memory_bytes is not None
        ]
        on_cpu = [
            worker.peak_memory_bytes for worker in member.workers if worker.peak_memory_bytes is not None
        ]
        seconds, load_seconds = busy * prepared.table.rows / rows, first.load_seconds or 0.0
        work, (whole_work, replicas) = prepared.plan.members[0].work, self._whole(trial, prepared)
        return replace(
            trial,
            seconds=seconds,
            load_seconds=load_seconds,
            whole_seconds=load_seconds + seconds * whole_work / max(work, 1e-9) / replicas,
            tokens_per_second=tokens / busy if tokens else None,
            rows_per_second=rows / busy,
            peak_bytes=max(on_gpu or on_cpu, default=None),
            ran_with=RanWith(first.dtype, first.attn_implementation, first.token_budget, tokens),
            values=values,
            lacking=lacking,
            why_lacking=why,
        )

    def _whole(self, trial: Trial, prepared: Prepared) -> tuple[float, int]:
        """The work of all rows, and how many replicas share it beside each other on GPUs, where a trial has one.

        Of the sample's rows where the whole table does not fit.
        """
        planned = tuple(member for member in self._prepared.plan.members if member.name == self.model.name)
        if self._on_gpu or not planned:  # other settings may have room for other replicas
            folder = prepared.config.output_dir
            try:
                made = self._made(trial.keys, self._prepared.table, folder, is_whole=True)
            except EnsembleError:
                planned = prepared.plan.members
            else:
                planned = made.plan.members
        return planned[0].work, planned[0].replicas if self._on_gpu else 1


def _is_complete(run_dir: Path) -> bool:
    """Whether a trial came to its end: of one that did not, the rows that are left say nothing of its speed."""
    try:
        return RunReport.read(RunDir(run_dir).run_json).status == "complete"
    except DataError:
        return False


def _bad_rows(member: MemberReport, table: InputTable) -> str:
    """Which rows of a trial's table could not be computed."""
    if not member.bad_rows:
        return "rows have values that are no numbers"
    row, reason = next(iter(member.bad_rows.items()))
    where = f"the first of them with id {quoted(str(table.ids[int(row)].as_py()))}"
    of = f"{len(member.bad_rows):,} of {plural(table.rows, 'row')} of the sample"
    return f"{of} could not be computed, {where}: {reason}"


def _cost(trial: Trial) -> float:
    return trial.whole_seconds if trial.whole_seconds is not None else float("inf")


def distances(
    expected: npt.NDArray[np.float64], values: npt.NDArray[np.float64], activation: Activation
) -> tuple[float, float, float]:
    """How far values are from those that are expected: mean and largest over rows, and the share of rows changed.

    A row's distance is the largest difference of one of its values: the mean over all cells would be the smaller
    the more labels there are.

    Args:
        expected, values: float64 [rows, labels].
        activation: what they are; of "none" distances are in standard deviations of what is expected, and no row
            has a first label.
    """
    differences = np.abs(values - expected)
    if activation == "none":
        spread = expected.std(axis=0)
        differences = differences / np.where(spread > 0, spread, 1.0)
        changed = np.zeros(len(values), np.bool_)
    elif activation == "softmax":
        changed = values.argmax(axis=1) != expected.argmax(axis=1)
    else:
        changed = ((values > 0.5) != (expected > 0.5)).any(axis=1)
    of_rows = differences.max(axis=1)
    return float(of_rows.mean()), float(of_rows.max()), float(changed.mean())


def _metric_differences(
    expected: npt.NDArray[np.float64], values: npt.NDArray[np.float64], truth: Truth, activation: Activation
) -> Iterator[MetricDifference]:
    sample = Bootstrap(truth, activation)
    for name in USUAL[activation]:
        metric = METRICS[name]
        try:
            first, second = sample.score(metric, expected), sample.score(metric, values)
        except DataError:  # such as an AUC of rows that all have one label
            continue
        yield MetricDifference(name, metric.greater_is_better, second.minus(first))
