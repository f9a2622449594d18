"""Which settings of each member are fastest on this machine and still give its probabilities, by trying them.

Each trial is a run of one member over a sample of the table, in a folder of its own below ``output_dir/tune``: what
ends it, resumes it and measures it is what does so for every run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import yaml

from ensemble.analysis.metrics import METRICS, USUAL, Bootstrap, Interval
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import digest_of
from ensemble.common.errors import ConfigError, DataError, EnsembleError, OutputError, WriteError
from ensemble.common.files import output_file, write_text
from ensemble.common.gpus import driver_session
from ensemble.common.host import cpu_products, is_busy, usable_cpus
from ensemble.common.packages import installed_versions, unsupported
from ensemble.common.protocol import Activation
from ensemble.common.text import duration, listed, plural
from ensemble.config import EnsembleConfig, LoadedConfig, MemberConfig, TuningConfig
from ensemble.data.table import InputTable, Truth
from ensemble.members.base import Assigned, Candidate, MemberKind, OutputColumns, RanWith
from ensemble.members.registry import member_kind
from ensemble.pipeline.load import load
from ensemble.pipeline.rehearse import sample_rows_of
from ensemble.pipeline.reuse import read_predictions
from ensemble.pipeline.run import Display, run_prepared
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.run_report import MemberReport, RunReport
from ensemble.pipeline.signals import heed_signals
from ensemble.pipeline.validate import Prepared, for_rows, prepare
from ensemble.scheduling.launchers.base import make_launcher
from ensemble.scheduling.state import MemberState

ROWS = 256
# The mean over rows of the largest difference of a probability; docs/tuning.md says why.
TOLERANCE = 0.02
# A candidate that has computed for so many times as long as the best took for the same rows is stopped.
_TOO_SLOW = 2.0
_MIN_SECONDS = 3.0
# A further setting is taken where it saves so much of the time: less is noise.
_WORTH_CHANGING = 0.95
# Where computing takes this many times as long as starting, a candidate gets a quarter of the rows first.
_WORTH_STARTING_TWICE = 2.0
_FEWER = 4
# What is computed in less than so many seconds says little of a speed: then there are more rows, if nobody says how
# many there are to be.
_SHORT_SECONDS = 2.0
_WANTED_SECONDS = 3.0
_MAX_ROWS = 2_048
_NOISY = 1.25  # times as long as the same took before
_MARKER = "tune.json"
_VERSIONS = ("torch", "transformers")


@dataclass(frozen=True)
class MetricDifference:
    """A metric of a candidate minus that of the reference, on the same rows."""

    metric: str
    greater_is_better: bool
    difference: Interval


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
        name: in words.
        keys: of the member, as the YAML has them.
        is_precision: whether it is of the first group, which changes numbers most.
        workers: side by side on a CPU; 0 on GPUs.
        rows: that were computed.
        failure: why there is no result, in a sentence; empty where there is one.
        seconds: of computing the sample's rows; None without a result.
        load_seconds: of the checkpoint, without the start of Python.
        whole_seconds: of loading and computing the whole table, about.
        tokens_per_second: None where the member has no tokens.
        peak_bytes: of the worker's process on a CPU, else of the GPU.
        mean, largest: over the rows, of each row's largest difference of a probability from the reference; of
            regression, of values in standard deviations of the reference's.
        changed: share of rows whose first label is another.
        is_within: whether it is as near to the reference as was asked for.
        bad_rows: that could not be computed.
    """

    name: str
    keys: Mapping[str, Any]
    is_precision: bool = False
    workers: int = 0
    rows: int = 0
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
    metrics: tuple[MetricDifference, ...] = ()
    ran_with: RanWith = field(default_factory=RanWith)
    is_within: bool = False
    bad_rows: int = 0
    values: npt.NDArray[np.float64] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class MemberTuning:
    """What was found of a member.

    Attributes:
        reference: the name of the trial that the others are held against; empty where none gave a result.
        best: the name of the fastest within the tolerance.
        keys: what is to be changed in the config for it; None: the key is to be left out.
        again: what computing took the reference once all was tried, by what it had taken at first: how far speeds
            may be off here; None where it was not measured.
    """

    name: str
    trials: tuple[Trial, ...]
    reference: str = ""
    best: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    again: float | None = None

    @property
    def is_reference_best(self) -> bool:
        return bool(self.best) and self.best == self.reference

    @property
    def is_noisy(self) -> bool:
        """Whether the same took so much longer or less at the end that its speeds say little."""
        return self.again is not None and not 1 / _NOISY <= self.again <= _NOISY


@dataclass(frozen=True)
class Tuning:
    """What was found of all members.

    Attributes:
        cpu_workers: how many workers side by side are fastest for every member; None where that was not measured,
            or members differ, or it is one for tables of this size alone.
        busy: that other programs computed on this machine before it began, in a sentence; empty where none did.
        seconds: that all of it took.
        tuned_on: the record of it.
    """

    members: tuple[MemberTuning, ...]
    skipped: tuple[str, ...]
    cpu_workers: int | None
    busy: str
    rows: int
    tolerance: float
    seconds: float
    tuned_on: TuningConfig

    @property
    def has_result(self) -> bool:
        """Whether anything that was tried of any member gave a result."""
        return any(one.best for one in self.members)

    @property
    def workers_found(self) -> str:
        """What was found of workers side by side, in words; empty where nothing was."""
        if self.cpu_workers is None:
            return ""
        cores = plural(self.tuned_on.cores or 0, "core")
        if self.cpu_workers == 1:
            return f"every member computes faster with one worker on all {cores} than with several"
        return f"{self.cpu_workers} side by side on {cores} are the fastest for every member"

    def overlay(self) -> str:
        """The YAML that says it, to be given behind the config's own files."""
        models = [{"name": one.name, **one.keys} for one in self.members if one.keys]
        document: dict[str, Any] = {"models": models} if models else {}
        if self.cpu_workers is not None:
            document["cpu_workers"] = self.cpu_workers
        document["tuned_on"] = self.tuned_on.model_dump(mode="json", exclude_none=True)
        lines = [
            f"# By `ensemble tune` on {self.tuned_on.date}: the fastest settings that change a row's",
            f"# probabilities by {self.tolerance:g} or less, in the mean over {plural(self.rows, 'row')}.",
            "# It takes effect as the last of the files in `ensemble run CONFIG THIS_FILE`.",
        ]
        for one in self.members:
            how = "nothing tried gave a result" if not one.best else one.best
            how += ", the reference itself" if one.is_reference_best else ""
            how += "; while something else computed, so measure again" if one.is_noisy else ""
            lines.append(f"# {one.name}: {how}")
        if self.cpu_workers is not None:
            lines.append(f"# cpu_workers: {self.workers_found}; leave it out elsewhere")
        return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)])


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


@driver_session()
def tune(
    loaded: LoadedConfig,
    display: Display,
    rows: int | None = None,
    tolerance: float | None = None,
    target: Path | None = None,
    owns_process: bool = True,
) -> Tuning:
    """Try settings of every member that has any to choose.

    Args:
        rows: of the sample; None: ``ROWS``, and more where those are done within a moment.
        tolerance: how far a candidate's probabilities may be from the reference's, in the mean over rows of a
            row's largest difference; and the share of rows whose first label may be another; None: ``TOLERANCE``.
        target: where to write the overlay, as :func:`check_output` gives it; None: nowhere.
        owns_process: as :func:`heed_signals` takes it.

    Raises:
        EnsembleError: of exit code 2 as a run would end before it writes anything, 3 when another ``tune`` goes on
            there, 1 where the disk was full; the same command then goes on.
        Interrupted: a signal came; the same command goes on.
    """
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(
            f"--tolerance: {tolerance} is no number of at least 0; {TOLERANCE:g} is the usual one"
        )
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows: {rows} is no number of rows; give at least 1")
    began = boot_seconds()
    busy = ""
    if is_busy():
        busy = "other programs compute here, so speeds say little"
    prepared = prepare(loaded, must_fit=False)
    config, gpus = loaded.config, prepared.plan.gpus
    devices = [one.name for one in gpus or prepared.inventory.hosts] or [cpu_products()]
    made_on = {
        "devices": sorted(devices),
        "versions": installed_versions(_VERSIONS),
        "cores": usable_cpus(),
        "asked": rows,
    }
    members = [
        _Member(
            prepared,
            index,
            rows,
            config.output_dir / "tune" / model.name,
            tolerance,
            display.say,
            owns_process,
        )
        for index, model in enumerate(config.models)
        if member_kind(model).needs_worker
    ]
    tunable = [one for one in members if one.count]
    skipped = tuple(
        model.name for model in config.models if model.name not in [one.model.name for one in tunable]
    )
    if not tunable:
        raise ConfigError(
            "models: no member has settings that tune could choose; it is for checkpoints that transformers loads"
        )
    folder = RunDir(config.output_dir / "tune")
    folder.create()
    with hold(folder), heed_signals(owns_process):
        _begin(folder.root, made_on)
        if busy:
            display.say(f"! {busy}: wait, or run it again later")
        count = sum(one.count for one in tunable)
        seconds = [one.expected_seconds() for one in tunable]
        about = f", about {duration(sum(seconds))}" if all(seconds) else ""
        display.say(
            f"{plural(count, 'trial')} at most, each in a fresh worker, of {tunable[0].rows:,} of "
            f"{plural(prepared.table.rows, 'row')}{about}; what is done is kept in {folder.root}"
        )
        found = [one.tune() for one in tunable]
        counts = {one.workers_found for one in tunable}
        cpu_workers = next(iter(counts)) if len(counts) == 1 else None
        tuning = Tuning(
            members=tuple(found),
            skipped=skipped,
            cpu_workers=cpu_workers,
            busy=busy,
            rows=min(one.rows for one in tunable),
            tolerance=tolerance,
            seconds=boot_seconds() - began,
            tuned_on=TuningConfig.model_validate(
                {
                    "versions": made_on["versions"],
                    "rows": min(one.rows for one in tunable),
                    "devices": [*dict.fromkeys(devices)],
                    "tolerance": tolerance,
                    "cores": None if cpu_workers is None else made_on["cores"],
                    "date": datetime.now(UTC).date().isoformat(),
                }
            ),
        )
        # Before what was measured may be forgotten: where it cannot be written, the same command goes on here.
        if target is not None and tuning.has_result:
            write_text(target, tuning.overlay())
        _mark(folder.root, {**made_on, "complete": True})
    return tuning


def check_output(output: Path, may_replace: bool, sources: Sequence[Path]) -> Path:
    """Where the overlay is to be written, asked before anything is tried.

    Raises:
        EnsembleError: a file is there already, or it is one of the config's, whose keys the overlay would lack,
            or there is no such folder, or nothing may be written there.
    """
    if not may_replace and os.path.lexists(output):
        raise OutputError(f"--write: {output} is there already; --force replaces it")
    target = output_file(output, sources)
    if not target.parent.is_dir():
        raise ConfigError(f"--write: {output}: name a file in a folder that is there")
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"--write: {output}: nothing may be written in its folder; choose another")
    return target


def _begin(folder: Path, made_on: Mapping[str, object]) -> None:
    """Keep what an interrupted ``tune`` has measured here with the same versions, and nothing else.

    Raises:
        OutputError: something is there that none has made.
    """
    others = [path for path in folder.iterdir() if path.name not in (".lock", _MARKER)]
    try:
        before = json.loads((folder / _MARKER).read_bytes())
    except OSError:
        before = None
        if others:
            raise OutputError(
                f"{folder}: holds {listed([path.name for path in others])}, which tune has not made; choose "
                "another output_dir"
            ) from None
    except ValueError:
        before = None
    if before != made_on:
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
    _mark(folder, made_on)


def _mark(folder: Path, made_on: Mapping[str, object]) -> None:
    write_text(folder / _MARKER, json.dumps(made_on) + "\n")


class _Sample:
    """Rows of every length, and fewer of them.

    Attributes:
        few: numbers of rows of the sample.
    """

    def __init__(self, prepared: Prepared, rows: int) -> None:
        self._table = prepared.table
        lengths = prepared.table.text_bytes
        self._chosen = sample_rows_of(lengths, rows)
        self.few = sample_rows_of(lengths[self._chosen], max(1, len(self._chosen) // _FEWER))
        self.truth = None if prepared.truth is None else prepared.truth[self._chosen]

    @property
    def rows(self) -> int:
        return len(self._chosen)

    def table(self, is_few: bool = False) -> InputTable:
        """A table of its rows: a new one for each run, which forgets its columns once the workers have them."""
        chosen = self._chosen[self.few] if is_few else self._chosen
        ids = self._table.ids.take(pa.array(chosen))
        return self._table.derived(chosen, ids, lambda _, column: column)


class _Member:
    """One member's trials.

    Attributes:
        workers_found: how many side by side on a CPU were fastest; None where only one count was tried, or where
            several compute faster, and only loading as many models takes what they save of this table.
    """

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
        self._may_grow = rows is None
        self._sample = _Sample(prepared, rows or ROWS)
        self._folder = folder
        self._tolerance = tolerance
        self._say = say
        self._config = prepared.config
        self.model: MemberConfig = prepared.config.models[index]
        self._kind: MemberKind[Any, Any] = member_kind(self.model)
        self.workers_found: int | None = None
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
        """Of its sample."""
        return self._sample.rows

    @cached_property
    def count(self) -> int:
        """How many trials there are at most, with that of the reference again; 0: there is nothing to choose."""
        groups = self._kind.candidates(self._prepared.inspected[self.model.name], self._assigned)
        if not any(groups):
            return 0
        precisions, *others = groups
        return len([*self._with_own(precisions)]) + sum(map(len, others)) + len(self._beside({})) + 1

    def expected_seconds(self) -> float:
        """Of all of them, by the speed of an earlier run or by a guess; 0 where nobody knows."""
        planned = [one for one in self._prepared.plan.members if one.name == self.model.name]
        share = self._sample.rows / max(1, self._prepared.table.rows)
        return sum(self.count * (one.speed.startup_seconds + one.whole_seconds * share) for one in planned)

    def tune(self) -> MemberTuning:
        name, inspected = self.model.name, self._prepared.inspected[self.model.name]
        (precisions, *_) = self._kind.candidates(inspected, self._assigned)
        for candidate in self._with_own(precisions):
            self._try(candidate.name, dict(candidate.keys))
        if (best := self._best) is None:
            self._say(f"{name}: nothing that was tried gave a result; its settings stay as they are")
            return MemberTuning(name, tuple(self._trials))
        group = 1
        while group < len(groups := self._kind.candidates(inspected, self._assigned, best.ran_with)):
            if group == len(groups) - 1:
                self._side_by_side(best)
                best = self._best or best
            before = best
            for candidate in groups[group]:
                computing = (before.whole_seconds or 0.0) - (before.load_seconds or 0.0)
                if computing < candidate.pays_from_seconds:
                    self._say(
                        f"{name}: {candidate.name}: not tried, as all rows are computed in "
                        f"{duration(computing)}, and it can pay from {duration(candidate.pays_from_seconds)} on"
                    )
                    continue
                self._try(
                    f"{before.name}, {candidate.name}", {**before.keys, **candidate.keys}, before.workers
                )
            best, group = self._best or best, group + 1
        if len(groups) == 1:  # there is nothing to try behind precisions
            self._side_by_side(best)
        best, reference = self._best or best, self._reference
        assert reference is not None
        assert reference.seconds is not None
        last = Trial(f"{reference.name}, again", reference.keys, workers=reference.workers)
        last = self._run(last, self._sample.table(), None)
        again = None if last.seconds is None else last.seconds / reference.seconds
        keys = self._changes(best.keys)
        return MemberTuning(name, tuple(self._trials), reference.name, best.name, keys, again)

    def _with_own(self, precisions: Sequence[Candidate]) -> Iterator[Candidate]:
        """The precisions, and behind them the config's own where that is none of them."""
        yield from precisions
        own = self._identity({})
        if own is not None and all(self._identity(one.keys) != own for one in precisions):
            yield Candidate("as configured", {})

    def _identity(self, keys: Mapping[str, Any]) -> str | None:
        """What its numbers depend on with these settings; None where they cannot be had."""
        try:
            prepared = self._made(keys, self._sample.table(), self._folder, 1)
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
            wanted = field_info.get_default(call_default_factory=True) if value is None else value
            if wanted != getattr(self.model, key):
                changed[key] = value
        own = self._identity({})
        for key in list(changed):
            rest = {name: value for name, value in changed.items() if name != key}
            is_idle = own is not None and key in ("dtype", "quantization_config", "attn_implementation")
            if is_idle and self._identity(rest) == self._identity(changed):
                del changed[key]
        return changed

    def _side_by_side(self, best: Trial) -> None:
        """Try ever more workers with a part of the cores each, as long as more of them take no longer."""
        tried: list[Trial] = []
        for count in self._beside(best.keys):
            before = self._best or best
            self._try(f"{best.name}, {count} workers", dict(best.keys), count)
            tried.append(self._trials[-1])
            if _cost(tried[-1]) > _cost(before):
                break
        if not tried or best.seconds is None:
            return
        if self._best is not None and self._best.workers > 1:
            self.workers_found = self._best.workers
        elif all(
            one.rows_per_second is not None  # else it failed, and nobody knows
            and (one.seconds is None or best.seconds < _WORTH_CHANGING * one.seconds)
            for one in tried
        ):
            self.workers_found = 1  # for a table of any size

    def _beside(self, keys: Mapping[str, Any]) -> Sequence[int]:
        """How many workers side by side are tried: those that a run would weigh, with two chunks for each."""
        if self._on_gpu or self._config.cpu_workers != "auto" or self._kind.request().replicas != "auto":
            return ()
        try:
            plan = self._made(keys, self._sample.table(), self._folder, "auto").plan
        except EnsembleError:  # it fits nowhere as it is
            return ()
        return [count for count in plan.cpu_choice if 2 * count <= len(plan.members[0].chunks)]

    def _try(self, name: str, keys: dict[str, Any], workers: int | None = None) -> None:
        """Try settings, on a few rows first where that is worth a start of its own.

        Args:
            workers: None: of a precision, as many as the config says.
        """
        asked, is_precision = self._config.cpu_workers, workers is None
        if workers is None:
            workers = 0 if self._on_gpu else 1 if asked == "auto" else asked
        trial = Trial(name, keys, is_precision, workers)
        sample, best, reference = self._sample, self._best, self._reference
        if best is not None and reference is not None and best.seconds and reference.seconds:
            startup = (reference.load_seconds or 0.0) + _MIN_SECONDS
            rows = len(sample.few)
            is_alone = workers == best.workers < 2  # several workers would lack chunks
            if is_alone and reference.seconds > _WORTH_STARTING_TWICE * startup and rows < sample.rows:
                few = self._run(trial, sample.table(is_few=True), best.seconds * rows / sample.rows)
                assert reference.values is not None
                few = self._held(few, reference.values[sample.few], None)
                if few.failure or few.mean > 2 * self._tolerance:
                    self._add(replace(few, is_within=False))
                    return
        trial = self._run(trial, sample.table(), best.seconds if best is not None else None)
        if reference is None and self._may_grow and trial.seconds and trial.seconds < _SHORT_SECONDS:
            rows = min(_MAX_ROWS, int(sample.rows * _WANTED_SECONDS / trial.seconds))
            self._sample = sample = _Sample(self._prepared, rows)
            if sample.rows > trial.rows:
                self._say(
                    f"{self.model.name}: {name}: done at once, so {plural(sample.rows, 'row')} are taken"
                )
                trial = self._run(replace(trial, rows=0, values=None), sample.table(), None)
        if not trial.failure and reference is None:
            self._reference = self._best = replace(trial, is_within=True)
            self._add(self._reference)
            return
        if not trial.failure and reference is not None:
            assert reference.values is not None
            trial = self._held(trial, reference.values, sample.truth)
            if trial.is_within and best is not None and _cost(trial) < _WORTH_CHANGING * _cost(best):
                self._best = trial
        self._add(trial)

    def _held(self, trial: Trial, expected: npt.NDArray[np.float64], truth: Truth | None) -> Trial:
        """A trial with how far it is from the reference."""
        if trial.values is None:
            return trial
        kind = self._prepared.inspected[self.model.name].activation
        mean, largest, changed = distances(expected, trial.values, kind)
        metrics = () if truth is None else tuple(_metric_differences(expected, trial.values, truth, kind))
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
        self, keys: Mapping[str, Any], table: InputTable, folder: Path, workers: int | Literal["auto"]
    ) -> Prepared:
        """A run of this member alone, with these keys.

        Raises:
            EnsembleError: it cannot be so, or does not fit.
        """
        loaded = self._prepared.loaded
        sets = [f"models.{self._index}.{key}={json.dumps(value)}" for key, value in keys.items()]
        config = load(loaded.paths, [*loaded.overrides, *sets]).config
        model, changes = config.models[self._index], dict[str, Any](weight=1.0, when=None)
        if self._on_gpu and getattr(model, "replicas", 1) == "auto":
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
            "cpu_workers": workers or 1,
            "tuned_on": None,
        }
        whole = replace(self._prepared, inspected={model.name: inspected})
        return replace(
            for_rows(whole, replace(loaded, config=config.model_copy(update=keys_of_run)), table),
            warnings=(),
            launcher=make_launcher(config.launcher, config.hang_timeout),
        )

    def _run(self, trial: Trial, table: InputTable, best_seconds: float | None) -> Trial:
        """Run a trial; whatever goes wrong with it is in its ``failure``."""
        slug = "".join(letter if letter.isalnum() else "-" for letter in trial.name)
        folder = self._folder / f"{slug}-{table.rows}"
        limit = None if best_seconds is None else max(_MIN_SECONDS, _TOO_SLOW * best_seconds)
        watching = _Watching(limit)
        trial = replace(trial, rows=table.rows)
        try:
            prepared = self._made(trial.keys, table, folder, trial.workers)
            is_done = _is_complete(folder)
            report = run_prepared(
                prepared, watching, not is_done, boot_seconds(), owns_process=self._owns_process
            )
        except _TooSlow:
            found = watching.rows_per_second
            said = "stopped, as it takes more than twice as long as the best so far"
            said += f" ({found:.3g} rows/s)" if found else ""
            return replace(trial, failure=said, rows_per_second=found)
        except WriteError:
            raise
        except EnsembleError as error:
            return replace(trial, failure=error.problems[0])
        (member,) = report.members
        if member.failure is not None or report.status != "complete":
            message = member.failure.message if member.failure is not None else f"the run is {report.status}"
            return replace(trial, failure=message)
        return self._measured(trial, prepared, report, member)

    def _measured(self, trial: Trial, prepared: Prepared, report: RunReport, member: MemberReport) -> Trial:
        values = _values(RunDir(prepared.config.output_dir).predictions(member.name))
        # Rows that nobody can compute, such as of images that are not there, speak against no candidate.
        lacking = max(len(member.bad_rows), int((~np.isfinite(values).all(axis=1)).sum()))
        allowed = len(values) - 1 if self._reference is None else self._reference.bad_rows
        if lacking > allowed:
            why = next(iter(member.bad_rows.values()), "not a number")
            return replace(trial, failure=f"{plural(lacking, 'row')} could not be computed: {why}")
        first = member.workers[0]
        if getattr(prepared.config.models[0], "torch_compile", False) and not first.compiled:
            why = next(
                (note for note in first.notes if note.startswith("torch_compile")), "it was not compiled"
            )
            return replace(trial, failure=why)
        busy = max((one.predict_seconds for one in member.workers), default=0.0)
        rows, tokens = (sum(getattr(one, name) for one in member.workers) for name in ("rows", "tokens"))
        if not rows or not busy:
            return replace(trial, failure="nothing was measured: its run says of no worker how long it took")
        on_gpu = [
            one.peak_gpu_memory_bytes for one in member.workers if one.peak_gpu_memory_bytes is not None
        ]
        on_cpu = [one.peak_memory_bytes for one in member.workers if one.peak_memory_bytes is not None]
        seconds, load_seconds = busy * prepared.table.rows / rows, first.load_seconds or 0.0
        work = prepared.plan.members[0].work
        return replace(
            trial,
            seconds=seconds,
            load_seconds=load_seconds,
            whole_seconds=load_seconds + seconds * self._whole_work(trial, prepared) / max(work, 1e-9),
            tokens_per_second=tokens / busy if tokens else None,
            rows_per_second=rows / busy,
            peak_bytes=max(on_gpu or on_cpu, default=None),
            ran_with=RanWith(
                first.dtype, first.attn_implementation, first.token_budget, first.compiled or False
            ),
            values=values,
            bad_rows=lacking,
        )

    def _whole_work(self, trial: Trial, prepared: Prepared) -> float:
        """The work of all rows; of the sample's where the whole table does not fit."""
        planned = [one.work for one in self._prepared.plan.members if one.name == self.model.name]
        if not planned:
            try:
                folder = prepared.config.output_dir
                made = self._made(trial.keys, self._prepared.table, folder, trial.workers)
                planned = [made.plan.members[0].work]
            except EnsembleError:
                planned = [prepared.plan.members[0].work]
        return planned[0]


def _is_complete(run_dir: Path) -> bool:
    """Whether a trial came to its end: of one that did not, the rows that are left say nothing of its speed."""
    try:
        return RunReport.read(RunDir(run_dir).run_json).status == "complete"
    except DataError:
        return False


def _cost(trial: Trial) -> float:
    return trial.whole_seconds if trial.whole_seconds is not None else float("inf")


def _values(path: Path) -> npt.NDArray[np.float64]:
    """A member's predictions, float64 [rows, labels].

    Raises:
        DataError: they cannot be read.
    """
    try:
        table = read_predictions(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read ({error}); run tune again") from error
    return np.column_stack([column.to_numpy() for column in table.columns])


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
            first, second = (sample.score(metric, one) for one in (expected, values))
        except DataError:  # such as an AUC of rows that all have one label
            continue
        yield MetricDifference(name, metric.greater_is_better, second.minus(first))
