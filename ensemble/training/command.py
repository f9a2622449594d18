"""Train all members that have ``train``: a training for each of their folds that has not ended well yet."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ensemble.common.clock import boot_seconds
from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import RESUMES, CheckpointError, ConfigError, MembersFailed, TimeLimitReached
from ensemble.common.files import atomic_path, write_text
from ensemble.common.python_process import python_command
from ensemble.common.shards import file_sha256
from ensemble.common.text import listed, plural, shown_path
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.config.training import PLACEHOLDERS
from ensemble.data.trained_rows import fold_count, write_trained_rows
from ensemble.members.huggingface.training_from_base import training_from_base
from ensemble.pipeline.run import Display
from ensemble.pipeline.run_dir import RunDir, head, hold, logging_to, system_errors_in
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.pipeline.trained_members import is_trained, missing_parts, with_trained
from ensemble.pipeline.training_data import TrainingData
from ensemble.pipeline.training_dir import TrainingDir, parts_of
from ensemble.training.again import Again, consent_text, texts_by_reason
from ensemble.training.check import check_trainings
from ensemble.training.data import read_training_data
from ensemble.training.jobs import Training, TrainingRun
from ensemble.training.records import Seal, TrainingReport, read_record, write_record
from ensemble.training.seal import (
    TABLES,
    ended_training,
    output_columns,
    seal_training,
    settle,
    use_again,
    why_to_train,
)

_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
# What {fold} is for a training on all rows.
ALL_ROWS = "-1"
# Of a run's time limit, the part that is kept for predictions and for writing.
_PREDICTING_SHARE = 0.2
# Of the time that is left, the part between two saves: what a time limit ends goes on from the last one.
_SAVING_SHARE = 0.1
_SAVE_SECONDS = 60.0  # without a limit


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Hold what a user asks of trainings.

    Attributes:
        fold: only this one, of all members; None: all.
        fresh: train anew what is trained already.
        retrain: begin even where trainings of more than an hour are made again, because something has changed.
        discard_old: remove finished trainings that others replace.
    """

    fold: int | None = None
    fresh: bool = False
    retrain: bool = False
    discard_old: bool = False


def train(
    loaded: LoadedConfig,
    display: Display,
    began: float,
    asked: Asked | None = None,
    owns_process: bool = True,
) -> TrainingReport:
    """Train the members of a config; what an earlier command has trained of the same is kept.

    Members with a ``failure`` in the report lack trainings; all others are complete, unless the time was over.

    Args:
        began: when the command began, by ``boot_seconds``; ``time_limit`` covers trainings and predictions.

    Raises:
        EnsembleError: of exit code 2 before any training begins, 3 if the directory is in use, 1 if the disk is
            full.
        Interrupted: a signal came.
    """
    config, asked = loaded.config, asked or Asked()
    if not config.trained_members:
        raise ConfigError("models: no member has train, so that there is nothing to train; give it to one")
    for warning in check_trainings(loaded):
        display.say(warning)
    data = read_training_data(loaded)
    if asked.fold is not None and not 0 <= asked.fold < data.splits:
        raise ConfigError(f"--fold: the folds are 0 to {data.splits - 1}, not {asked.fold}")
    rows = plural(data.main.table.rows, "row")
    display.say(f"{shown_path(config.training_data.path)}: {rows} in {plural(data.splits, 'fold')}")
    for remark in data.remarks:
        display.say(remark)
    rundir, files = RunDir(config.output_dir), TrainingDir(config.output_dir)
    ends_at = None if config.time_limit is None else began + (1.0 - _PREDICTING_SHARE) * config.time_limit
    with system_errors_in("the training"):
        rundir.create()
        with hold(rundir), heed_signals(owns_process) as signals:
            files.tidy()
            files.train_log.parent.mkdir(parents=True, exist_ok=True)
            with logging_to(files.train_log, loaded.redactor):
                return _train(loaded, display, signals, data, asked, ends_at)


def train_for_run(
    loaded: LoadedConfig,
    display: Display,
    began: float,
    asked: Asked | None = None,
    owns_process: bool = True,
) -> LoadedConfig:
    """Train what a run lacks, and return its config with ordinary members in place of those that are trained.

    A member that fails, or for which there is no time, is in ``untrained``: it fails in the run, too.

    Args:
        began: as for ``train``.

    Raises:
        MembersFailed: a member failed, and neither on_member_failure nor a time limit asks for results without it.
        TimeLimitReached: no member could be trained, and an earlier submission would be replaced by one that says
            nothing.
        EnsembleError: as for ``train``.
    """
    config = loaded.config
    if not config.trained_members:
        return loaded
    remark = _taken_as_sealed(loaded)
    if remark:
        display.say(remark)
        return with_trained(loaded)
    report = train(loaded, display, began, asked, owns_process)
    if config.on_member_failure == "fail" and config.time_limit is None:
        raise_unless_trained(report)
    failures = {member.name: member.failure for member in report.members}
    untrained = {}
    for model in config.trained_members:
        missing = ", ".join(part.text for part in missing_parts(loaded, model))
        if missing:
            untrained[model.name] = failures.get(model.name) or (
                f"there was no time to train {missing}; {RESUMES}{_kept_text(config, model)}"
            )
            display.say(f"{model.name} is left out: {untrained[model.name]}")
    out_of_time = frozenset(name for name in untrained if not failures.get(name))
    deciding = {model.name for model in config.models if model.has_weight}
    submission = RunDir(config.output_dir).submission
    if deciding and deciding <= out_of_time and submission.exists():
        raise TimeLimitReached(
            f"no member could be trained in time; {shown_path(submission)} stays as an earlier run has left it; "
            f"{RESUMES}"
        )
    loaded = with_trained(loaded, may_lack=True)
    return replace(loaded, untrained=untrained, out_of_time=out_of_time)


def _kept_text(config: RunConfig, model: MemberConfig) -> str:
    """Return that finished trainings are there, but not used since a change; empty: there are none."""
    files = TrainingDir(config.output_dir)
    parts = parts_of(model, fold_count(files.trained_rows(model.name)))
    kept = [part.text for part in parts if files.outdated_seal(model.name, part).exists()]
    if not kept:
        return ""
    return f". Its earlier trainings are kept ({listed(kept, 10, str)}): undo the change, and they are used again"


def preview_trainings(loaded: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """Check all that shows before a training begins, its tables included.

    Returns:
        the config with what is to be trained anew (``outdated``), and sentences for the user.

    Raises:
        EnsembleError: of exit code 2, with the problems.
    """
    config, files = loaded.config, TrainingDir(loaded.config.output_dir)
    if not config.trained_members:
        return loaded, []
    remark = _taken_as_sealed(loaded)
    if remark:
        return loaded, [remark]
    sentences, data = check_trainings(loaded), read_training_data(loaded)
    outdated: dict[str, dict[int | None, str]] = {}
    again: list[Again] = []
    for model in config.trained_members:
        reasons = {
            training.part: why_to_train(files, model.name, training.part, training.made_of, training.tables)
            for training in _trainings(config, files, data, model)
        }
        changed = [Again.of(files, model.name, part, why) for part, why in reasons.items() if why]
        if changed:
            outdated[model.name] = {part.fold: why for part, why in reasons.items() if why is not None}
        again += changed
        back = [
            part.text
            for part, why in reasons.items()
            if why is None and not files.is_finished(model.name, part)
        ]
        if back:
            sentences.append(
                f"{model.name}: {listed(back, 10, str)}: trained already, and used again by train or run"
            )
    sentences += texts_by_reason(again, "would be trained anew")
    sentences += filter(None, [consent_text(again)])
    return replace(loaded, outdated=outdated), [*sentences, *data.remarks]


def raise_unless_trained(report: TrainingReport) -> None:
    """Raise ``MembersFailed`` if trainings have failed, or ``TimeLimitReached`` if the time was over."""
    failed = [member for member in report.members if member.failure]
    if failed:
        raise MembersFailed(
            [f"member {member.name} failed: {member.failure}; {RESUMES}" for member in failed]
        )
    if report.status == "time_limit":
        raise TimeLimitReached(f"stopped at time_limit, before all trainings were done; {RESUMES}")


def untrained_text(loaded: LoadedConfig) -> str:
    """Return which trainings the out-of-fold predictions still wait for."""
    lacking = []
    for model in loaded.config.trained_members:
        parts = missing_parts(loaded, model)
        if parts:
            lacking.append(f"{model.name} lacks {listed([part.text for part in parts], 5, str)}")
    return f"out-of-fold predictions are made when all folds are trained; {'; '.join(lacking)}"


def _taken_as_sealed(loaded: LoadedConfig) -> str:
    """Return that members are taken as they were trained, because something to train them from is gone; else "".

    Raises:
        ConfigError: a setting has changed, or a file of a checkpoint.
    """
    config, files = loaded.config, TrainingDir(loaded.config.output_dir)
    lost = next(_lost(config), None) if is_trained(loaded) else None
    if lost is None:
        return ""
    problems = []
    for model in config.trained_members:
        settings = made_of(config, model)
        for part in parts_of(model, fold_count(files.trained_rows(model.name))):
            reason = why_to_train(files, model.name, part, settings)
            if reason is not None:
                problems.append(
                    f"{model.name}: {part.text} must be trained anew, and {lost} is gone: {reason}"
                )
    if problems:
        raise ConfigError(problems)
    return f"{lost} is gone: the members are taken as they were trained"


def _lost(config: RunConfig) -> Iterator[str]:
    """Yield the tables and base models that are gone, of those that a training needs."""
    yield from (shown_path(path) for path in config.training_files if not path.exists())
    for model in config.trained_members:
        training = training_from_base(model)
        if training is not None and training.folder is None:
            yield f"the base model {shown_path(Path(training.base_model))}"


def _train(
    loaded: LoadedConfig,
    display: Display,
    signals: Signals,
    data: TrainingData,
    asked: Asked,
    ends_at: float | None,
) -> TrainingReport:
    """Sort out what is trained already, write the tables of the other trainings, and run these."""
    config, files = loaded.config, TrainingDir(loaded.config.output_dir)
    trainings = [
        training for model in config.trained_members for training in _trainings(config, files, data, model)
    ]
    had_ended = [
        ended_training(files, training.model.name, training.part, training.made_of) is not None
        for training in trainings
    ]
    refusals = [_take_up(config, files, training, asked.discard_old, display) for training in trainings]
    reasons = [
        refusal or why_to_train(files, training.model.name, training.part, training.made_of, training.tables)
        for training, refusal in zip(trainings, refusals, strict=True)
    ]
    are_asked = [asked.fold in (None, training.part.fold) for training in trainings]
    again: dict[bool, list[Again]] = {True: [], False: []}
    for training, why, is_asked in zip(trainings, reasons, are_asked, strict=True):
        if why:
            again[is_asked].append(Again.of(files, training.model.name, training.part, why))
    consent = consent_text(again[True])
    if consent and not asked.retrain and not asked.fresh:
        raise ConfigError([*texts_by_reason(again[True], "would be trained anew"), consent])
    for is_asked, outcome in ((True, "trained anew"), (False, "kept, but not used")):
        for text in texts_by_reason(again[is_asked], outcome):
            display.say(text)
    to_run: list[Training] = []
    for training, why, is_asked, ended in zip(trainings, reasons, are_asked, had_ended, strict=True):
        name, part = training.model.name, training.part
        # What has just been sealed is what --fresh has asked for before.
        is_fresh = asked.fresh and is_asked and not (ended and why is None)
        if why is None and not is_fresh and use_again(files, name, part, training.made_of):
            display.say(
                f"{name}: {part.text} is used again, as nothing that it was trained from differs any more"
            )
        if why or is_fresh:  # never beside a fold of another division
            files.set_aside(name, part)
        aside = read_record(files.outdated_seal(name, part), Seal) if is_fresh else None
        if aside is not None:
            write_record(files.outdated_seal(name, part), replace(aside, is_replaced=True))
        # What another training left is not taken for what this one will leave.
        if is_asked and (why or is_fresh or files.ended(name, part).exists()):
            files.clear(name, part)
        if why is None or is_asked:
            to_run.append(replace(training, is_done=why is None and not is_fresh))
    for model in config.trained_members:
        names = [training.part.text for training in to_run if training.model is model and training.is_done]
        if names:
            display.say(f"{model.name}: trained already: {listed(names, 10, str)}")
    if asked.fresh and asked.fold is None:
        shutil.rmtree(files.rungs, ignore_errors=True)
    data.write_folds(files.folds)
    lacking = [training for training in to_run if not training.is_done]
    _write_data(config, files, data, lacking, ends_at)
    run = TrainingRun(loaded, to_run, display, signals, data.file_states, ends_at, asked.discard_old)
    return run.run()


def _take_up(
    config: RunConfig, files: TrainingDir, training: Training, discard_old: bool, display: Display
) -> str:
    """Finish what a command has begun with a training that has ended; return why it is refused, or ""."""
    name, part = training.model.name, training.part
    settle(files, name, part, discard_old)
    ended = ended_training(files, name, part, training.made_of)
    if ended is None:
        return ""
    try:  # the user may have mended what was refused
        note = seal_training(files, training.model, part, output_columns(config), ended, discard_old)
    except (CheckpointError, ConfigError) as error:
        return f"what it has left is refused: {'; '.join(error.problems)}"
    display.say(f"{name}: {part.text}: what its training has left is taken now{note and f'; {note}'}")
    return ""


def _trainings(
    config: RunConfig, files: TrainingDir, data: TrainingData, model: MemberConfig
) -> Iterator[Training]:
    """Yield a member's trainings, with the commands that do them."""
    assert model.training is not None
    from_base, users_command = training_from_base(model), model.training.command or ()
    settings, tables = made_of(config, model), data.digests(model.name)
    for part in parts_of(model, data.splits):
        values = {
            "train": str(files.train_file(part, data.suffix).absolute()),
            "fold": ALL_ROWS if part.fold is None else str(part.fold),
            "out": str(files.unfinished(model.name, part).absolute()),
        }
        command = [_PLACEHOLDER.sub(lambda match: values[match[1]], text) for text in users_command]  # noqa: B023
        if from_base is not None:
            command = [*python_command(from_base.program), str(files.spec(model.name, part).absolute())]
        yield Training(
            model=model,
            part=part,
            command=tuple(command),
            from_base=from_base,
            made_of={TABLES: data.digest(model.name, data.rows_of(part.fold)), **settings},
            tables=tables,
        )


def made_of(config: RunConfig, model: MemberConfig) -> dict[str, str]:
    """Return digests of what a member's trainings depend on beside rows; a base model that is gone is left out."""
    seed = {"seed": str(config.seed)}
    training = training_from_base(model)
    if training is not None:
        return {**seed, **training.made_of(config.labels, FileDigests(whole=config.hash_weights))}
    assert model.training is not None
    command = model.training.command or ()
    scripts = {f"the script {path}": file_sha256(path) for path in _scripts(command)}
    return {**seed, "train.command": digest_of(command), **scripts}


def _scripts(command: Sequence[str]) -> Iterator[Path]:
    """Yield the scripts that a command names: files that end in .py, and a program that begins with ``#!``."""
    for text in command:
        path = Path(text)
        if (path.suffix == ".py" and path.is_file()) or (text is command[0] and head(path).startswith(b"#!")):
            yield path


def _write_data(
    config: RunConfig,
    files: TrainingDir,
    data: TrainingData,
    trainings: Sequence[Training],
    ends_at: float | None,
) -> None:
    """Write what the commands read: a table for each part of users' commands, and the trainer's specs."""
    table = files.root / "data/table.arrow"
    table.parent.mkdir(exist_ok=True)
    for part in dict.fromkeys(training.part for training in trainings if not training.is_built_in):
        data.write_for_command(files.train_file(part, data.suffix), data.rows_of(part.fold))
    to_train = {training.model.name for training in trainings}
    for model in config.trained_members:
        rows = files.trained_rows(model.name)
        if model.name in to_train or not fold_count(rows):
            rows.parent.mkdir(parents=True, exist_ok=True)
            write_trained_rows(rows, data.trained_rows(model.name))
    built_in = [(training, training.from_base) for training in trainings if training.from_base is not None]
    if not built_in:
        return
    with atomic_path(table) as temporary:
        data.table.publish(temporary)
    for part in dict.fromkeys(training.part for training, _ in built_in):
        data.write_for_trainer(files.train_file(part, ".npz"), data.rows_of(part.fold))
    save_seconds = _SAVE_SECONDS
    if ends_at is not None:
        save_seconds = min(_SAVE_SECONDS, _SAVING_SHARE * max(0.0, ends_at - boot_seconds()))
    for training, from_base in built_in:
        spec = {
            **from_base.spec(config.labels),
            "table": str(table.absolute()),
            "rows": str(files.train_file(training.part, ".npz").absolute()),
            "out": str(files.unfinished(training.model.name, training.part).absolute()),
            "seed": config.seed,
        }
        if spec["train"]["method"] == "head":
            spec["features"] = str(files.features.absolute())
        else:
            spec["save_seconds"] = save_seconds
        write_text(files.spec(training.model.name, training.part), json.dumps(spec))
