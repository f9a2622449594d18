"""Train each missing fold of all members that have ``train``, and predict with the members.

``ensemble train`` and ``ensemble run`` take the same road: the directory is held, missing folds are trained, and an
ordinary run follows, in which ordinary members stand for the trained ones. It is over the training table, each row
by models that have not seen it, or over the config's own table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ensemble.common.clock import boot_seconds
from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import (
    RESUMES,
    CheckpointError,
    ConfigError,
    DataError,
    MembersFailed,
    TimeLimitReached,
)
from ensemble.common.files import atomic_path, free_bytes, remove_temporary_files, write_text
from ensemble.common.logged_command import command_problems, with_values
from ensemble.common.python_process import python_command
from ensemble.common.shards import file_sha256
from ensemble.common.text import gib, listed, plural, shown_path
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.config.schema import DEFAULT_FOLDS, PLACEHOLDERS
from ensemble.data.trained_rows import fold_count, write_trained_rows
from ensemble.jobs.job import jobs_of
from ensemble.members.huggingface.training_from_base import TrainingFromBase, training_from_base
from ensemble.members.questions import ask
from ensemble.members.registry import KINDS, member_kind
from ensemble.pipeline.ending import raise_unless_complete
from ensemble.pipeline.load import derived_run
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import Display, held_directory, run_prepared
from ensemble.pipeline.run_dir import RunDir, head, logging_to, system_errors_in
from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.signals import Signals
from ensemble.pipeline.trackers import missing_trackers
from ensemble.pipeline.trained_members import is_trained, missing_parts, with_trained
from ensemble.pipeline.training_dir import Part, TrainingDir, parts_of
from ensemble.training.data import TrainingData, learned_activation, read_training_data, untrained_inputs
from ensemble.training.jobs import TrainingRun
from ensemble.training.records import PartRecord, Seal, TrainingReport, read_record, write_record
from ensemble.training.seal import Training, as_it_stands, consent_text, seal_training, texts_by_reason

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


@contextlib.contextmanager
def trained(
    loaded: LoadedConfig,
    display: Display,
    began: float,
    asked: Asked | None = None,
    owns_process: bool = True,
) -> Iterator[tuple[TrainingReport, Signals]]:
    """Train the members of a config, and hold ``output_dir`` until the block has predicted with them.

    What an earlier command has trained of the same is kept. Members with a ``failure`` in the report lack
    trainings; all others are complete, unless the time was over.

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
    check_trainings(loaded)
    data = read_training_data(loaded)
    if asked.fold is not None and not 0 <= asked.fold < data.splits:
        raise ConfigError(f"--fold: the folds are 0 to {data.splits - 1}, not {asked.fold}")
    rows = plural(data.main.table.rows, "row")
    display.say(f"{shown_path(config.training_data.path)}: {rows} in {plural(data.splits, 'fold')}")
    for remark in data.remarks:
        display.say(remark)
    files = TrainingDir(config.output_dir, asked.discard_old)
    ends_at = None if config.time_limit is None else began + (1.0 - _PREDICTING_SHARE) * config.time_limit
    with contextlib.ExitStack() as held:
        with system_errors_in("the training"):
            signals = held.enter_context(held_directory(RunDir(config.output_dir), owns_process))
            files.tidy()
            files.train_log.parent.mkdir(parents=True, exist_ok=True)
            with logging_to(files.train_log, loaded.redactor):
                command = _Command(loaded, files, display, signals, asked, began, ends_at, owns_process)
                report = _train(command, data)
        yield report, signals


@contextlib.contextmanager
def trained_for_run(
    loaded: LoadedConfig,
    display: Display,
    began: float,
    asked: Asked | None = None,
    owns_process: bool = True,
) -> Iterator[tuple[LoadedConfig, Signals | None]]:
    """Train what a run lacks, and give its config with ordinary members in place of those that are trained.

    ``output_dir`` is held until the block has run the config, if there was something to train; else no signals are
    given. A member that fails, or for which there is no time, is in ``untrained``: it fails in the run, too.

    Args:
        began: as for ``trained``.

    Raises:
        MembersFailed: a member failed, and neither on_member_failure nor a time limit asks for results without it.
        EnsembleError: as for ``trained``.
    """
    config = loaded.config
    if not config.trained_members:
        yield loaded, None
        return
    remark = _taken_as_sealed(loaded)
    if remark:
        display.say(remark)
        yield with_trained(loaded), None
        return
    with trained(loaded, display, began, asked, owns_process) as (report, signals):
        if config.on_member_failure == "fail" and config.time_limit is None:
            raise_unless_trained(report)
        files = TrainingDir(config.output_dir)
        failures = {member.name: member.failure for member in report.members}
        untrained = {}
        for model in config.trained_members:
            missing = missing_parts(loaded, model)
            if missing:
                names = ", ".join(part.text for part in missing)
                why = f"there was no time to train {names}; {RESUMES}"
                kept = [part.text for part in missing if files.seal(model.name, part).exists()]
                if kept:
                    names = listed(kept, 10, str)
                    why += f". Its earlier trainings are kept ({names}), and used again if a change is undone"
                untrained[model.name] = failures.get(model.name) or why
                display.say(f"{model.name} is left out: {untrained[model.name]}")
        out_of_time = frozenset(name for name in untrained if not failures.get(name))
        ready = with_trained(loaded, may_lack=True)
        yield replace(ready, untrained=untrained, out_of_time=out_of_time), signals


def predict_held_out(
    loaded: LoadedConfig, display: Display, began: float, owns_process: bool = True
) -> RunReport:
    """Predict the rows that each fold holds out, and write ``oof/<member>.csv`` of members that have all of them.

    The run has its own directory, ``training/oof``, and resumes there. Its ensemble is the plain mean of the
    trained members and of inputs that are not trained.

    Args:
        loaded: the config as it was loaded, with members that have ``train``.
        began: when the command began, by ``boot_seconds``; ``time_limit`` is counted from there.

    Raises:
        EnsembleError: of exit code 2 if a member is not trained, or if the table is not the one of its training;
            else as ``pipeline.run.run``.
    """
    files = TrainingDir(loaded.config.output_dir)
    report = _predict_held_out(loaded, files.oof_run, display, began, owns_process)
    trained_names = {model.name for model in loaded.config.trained_members}
    for member in report.members:
        if member.status == "complete" and member.name in trained_names:
            target = files.oof(member.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_temporary_files(target)
            with atomic_path(target) as temporary:
                shutil.copyfile(RunDir(files.oof_run).predictions(member.name), temporary)
    return report


def _predict_held_out(
    loaded: LoadedConfig, folder: Path, display: Display, began: float, owns_process: bool
) -> RunReport:
    """Predict the rows that each fold holds out, by a run in ``folder``; see ``predict_held_out``."""
    prepared = prepare(_out_of_fold(loaded, folder), is_for_run=True)
    try:
        _demand_one_fold(prepared)
    except DataError:
        prepared.launcher.close()
        raise
    return run_prepared(prepared, display, False, began, owns_process)


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
    check_trainings(loaded)
    sentences: list[str] = []
    data = read_training_data(loaded)
    trainings: list[Training] = []
    outdated: dict[str, dict[int | None, str]] = {}
    for name, group in itertools.groupby(_trainings(config, files, data), lambda item: item.model.name):
        of_member = [as_it_stands(files, training) for training in group]
        inputs = [item for item in of_member[0].model.input_names if item in outdated]
        if inputs:
            why = f"the predictions of {listed(inputs, 5, str)} change"
            of_member = [
                replace(item, is_done=False, why=why) if item.is_done else item for item in of_member
            ]
        trainings += of_member
        sentences += texts_by_reason(of_member, "would be trained anew")
        if any(training.why for training in of_member):
            outdated[name] = {item.part.fold: item.why for item in of_member if not item.is_done}
        done = [item.part for item in of_member if item.is_done]
        back = [part.text for part in done if not files.is_finished(name, part)]
        if back:
            sentences.append(
                f"{name}: {listed(back, 10, str)}: trained already, and used again by train or run"
            )
    sentences.append(consent_text(trainings))
    return replace(loaded, outdated=outdated), [*filter(None, sentences), *data.remarks]


def check_trainings(loaded: LoadedConfig) -> None:
    """Check all that shows before a training begins.

    Raises:
        ConfigError: with every problem, each with its key.
    """
    problems = [*missing_trackers(loaded)]  # of the run that follows
    from_base: dict[str, TrainingFromBase] = {}
    for index, model in enumerate(loaded.config.models):
        key, training = f"models[{index}].train", training_from_base(model)
        if training is not None:
            from_base[key] = training
        elif model.training is not None:
            texts = command_problems(model.training.command or (), PLACEHOLDERS)
            problems += (f"{key}.command: {text}" for text in texts)
            problems += (f"models[{index}].{text}" for text in member_kind(model).problems_before_training())
    ask([question for training in from_base.values() for question in training.questions()])
    for key, training in from_base.items():
        problems += training.problems(key)
    written, free = disk_of_trainings(loaded, from_base.values())
    if free is not None and written > free:
        problems.append(
            f"output_dir: its trainings write about {gib(written)} to "
            f"{TrainingDir(loaded.config.output_dir).root}, where {gib(free)} are free; make room, choose "
            "another output_dir, or train with method: lora"
        )
    if problems:
        raise ConfigError(problems)


def disk_of_trainings(
    loaded: LoadedConfig, from_base: Iterable[TrainingFromBase] | None = None
) -> tuple[int, int | None]:
    """Return the bytes that missing trainings from base models write, and those that are free; None: not known.

    ``from_base``: these trainings; None: all of the config.
    """
    if from_base is None:
        from_base = filter(None, map(training_from_base, loaded.config.models))
    written = 0
    for training in from_base:
        written += training.disk_bytes(len(missing_parts(loaded, training.model, splits=DEFAULT_FOLDS)))
    return written, free_bytes(TrainingDir(loaded.config.output_dir).root)


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


def raise_unless_predicted(report: RunReport) -> None:
    """Raise ``TimeLimitReached`` or ``MembersFailed`` if ``oof/`` lacks a member."""
    if report.status == "time_limit":
        raise TimeLimitReached(
            f"stopped at time_limit, before all rows were predicted by models that have not seen them; {RESUMES}"
        )
    raise_unless_complete(report)


def _taken_as_sealed(loaded: LoadedConfig) -> str:
    """Return that members are taken as they were trained, because something to train them from is gone; else "".

    Raises:
        ConfigError: a setting has changed, or a file of a checkpoint.
    """
    lost = next(_lost(loaded.config), None) if is_trained(loaded) else None
    if lost is None:
        return ""
    problems = outdated_texts(loaded, f"must be trained anew, and {lost} is gone")
    if problems:
        raise ConfigError(problems)
    return f"{lost} is gone: the members are taken as they were trained"


def outdated_texts(loaded: LoadedConfig, outcome: str) -> list[str]:
    """Return which finished trainings a setting outdates, or a file of a checkpoint; tables are not read."""
    config, files, trainings = loaded.config, TrainingDir(loaded.config.output_dir), []
    for model in config.trained_members:
        settings = made_of(config, model)
        for part in parts_of(model, fold_count(files.trained_rows(model.name))):
            trainings.append(as_it_stands(files, Training(model=model, part=part, made_of=settings)))
    return [*texts_by_reason(trainings, outcome)]


def _lost(config: RunConfig) -> Iterator[str]:
    """Yield the tables and base models that are gone, of those that a training needs."""
    inputs = [TrainingDir(config.output_dir).oof(name) for name in untrained_inputs(config)]
    yield from (shown_path(path) for path in (*config.training_files, *inputs) if not path.exists())
    for model in config.trained_members:
        training = training_from_base(model)
        if training is not None and training.folder is None:
            yield f"the base model {shown_path(Path(training.base_model))}"


@dataclass(frozen=True)
class _Command:
    """Hold what all trainings of a command share."""

    loaded: LoadedConfig
    files: TrainingDir
    display: Display
    signals: Signals
    asked: Asked
    began: float
    ends_at: float | None
    owns_process: bool

    def only(self, names: Sequence[str]) -> LoadedConfig:
        """Return the config without other members that are trained, for a run until trainings have to end."""
        config = self.loaded.config
        models = tuple(model for model in config.models if model.training is None or model.name in names)
        time_limit = None if self.ends_at is None else self.ends_at - self.began
        changes = {"models": models, "time_limit": time_limit, "report": False}
        return replace(self.loaded, config=config.model_copy(update=changes))


def _train(command: _Command, data: TrainingData) -> TrainingReport:
    """Train all members, those that read others (``inputs``) after these have predicted the training table."""
    loaded, files, display = command.loaded, command.files, command.display
    if command.asked.fresh and command.asked.fold is None:
        shutil.rmtree(files.rungs, ignore_errors=True)
    report, waiting = TrainingReport("complete", 0.0, ()), [*loaded.config.trained_members]
    inputs = {name for model in waiting for name in model.input_names}
    predicting: list[str] = []
    while waiting:
        names = {model.name for model in waiting}
        models = [model for model in waiting if names.isdisjoint(model.input_names)]
        waiting = [model for model in waiting if model not in models]
        failures = {member.name: member.failure for member in report.members if member.failure}
        if predicting and report.status != "time_limit":
            display.say(f"out-of-fold predictions, to learn from: {listed(predicting, 5, str)}")
            folder, config = files.inputs_run, command.only(predicting)
            run = _predict_held_out(config, folder, display, command.began, command.owns_process)
            complete = [member.name for member in run.members if member.status == "complete"]
            data = data.with_inputs({name: RunDir(folder).predictions(name) for name in complete})
            failures |= {failure.member: failure.message for failure in run.failures}
            report = replace(report, status="time_limit") if run.status == "time_limit" else report
        for model in models:
            failed = [name for name in model.input_names if name in failures]
            if failed:
                why = f"it reads the predictions of {failed[0]}, which failed: {failures[failed[0]]}"
                report = report.with_failure(model.name, files.trained_rows(model.name).parent, why)
        ready = {model.name: model for model in models if data.inputs.keys() >= {*model.input_names}}
        data = replace(data, members=ready)
        report = _train_together(command, data, report)
        predicting += [name for name in ready if name in inputs and not missing_parts(loaded, ready[name])]
    return report


def _train_together(command: _Command, data: TrainingData, earlier: TrainingReport) -> TrainingReport:
    """Sort out what is trained already, write the tables of the other trainings, and run these."""
    loaded, files, display, asked = command.loaded, command.files, command.display, command.asked
    config, signals, ends_at = loaded.config, command.signals, command.ends_at
    trainings = [_take_up(config, files, training, display) for training in _trainings(config, files, data)]
    chosen = [training for training in trainings if asked.fold in (None, training.part.fold)]
    others = [training for training in trainings if training not in chosen]
    consent = consent_text(chosen)
    if consent and not asked.retrain and not asked.fresh:
        raise ConfigError([*texts_by_reason(chosen, "would be trained anew"), consent])
    for text in (*texts_by_reason(chosen, "trained anew"), *texts_by_reason(others, "kept, but not used")):
        display.say(text)
    to_run: list[Training] = []
    for training in trainings:
        name, part, is_asked = training.model.name, training.part, training in chosen
        # What has just been taken was not in use yet: --fresh asked for it before, or it has been mended.
        is_fresh = asked.fresh and is_asked and not training.is_taken
        is_done = training.is_done and not is_fresh
        if training.is_done != files.is_finished(name, part):
            files.trained_rows(name).unlink(missing_ok=True)  # they are of other folds than those in use now
        if is_done:
            files.clear(name, part)
        elif (is_fresh or not training.goes_on) and (is_asked or files.is_finished(name, part)):
            # What is finished stays, out of use; what a stopped one has left is not taken for what this leaves.
            files.clear(name, part)
            files.begun(name, part).parent.mkdir(parents=True, exist_ok=True)
            record = PartRecord(part.fold, "training" if is_asked else "waiting")
            write_record(files.begun(name, part), Seal(dict(training.made_of), record))
        if is_done or is_asked:
            to_run.append(replace(training, is_done=is_done))
    for model in data.members.values():
        names = [training.part.text for training in to_run if training.model is model and training.is_done]
        if names:
            display.say(f"{model.name}: trained already: {listed(names, 10, str)}")
    data.write_folds(files.folds)
    lacking = [training for training in to_run if not training.is_done]
    _write_data(config, files, data, lacking, ends_at)
    return TrainingRun(loaded, files, to_run, earlier, display, signals, data.file_states, ends_at).run()


def _take_up(config: RunConfig, files: TrainingDir, training: Training, display: Display) -> Training:
    """Take what a training has left that has ended well, and tell how it stands then."""
    name, part, is_taken, refusal = training.model.name, training.part, False, ""
    begun = read_record(files.begun(name, part), Seal)
    if begun is not None and begun.files:
        files.put_in_place(name, part)
        is_taken = True
    elif begun is not None and begun.has_ended_as(training.made_of) and files.unfinished(name, part).is_dir():
        try:  # the user may have mended what was refused
            note = seal_training(files, config, training.model, part, begun)
        except (CheckpointError, ConfigError) as error:
            refusal = f"what it has left is refused: {'; '.join(error.problems)}"
        else:
            display.say(f"{name}: {part.text}: what its training has left is taken now{note and f'; {note}'}")
            is_taken = True
    training = as_it_stands(files, training)
    return replace(training, is_taken=is_taken, why=refusal or training.why)


def _trainings(config: RunConfig, files: TrainingDir, data: TrainingData) -> Iterator[Training]:
    """Yield the trainings of all members that the data is for, with the commands that do them."""
    for model in data.members.values():
        from_base, settings = training_from_base(model), made_of(config, model)
        for part in parts_of(model, data.splits):
            if from_base is not None:
                spec = files.spec(model.name, part)
                command = [*python_command(from_base.program), str(spec.absolute())]
            else:
                command = _users_command(files, data, model, part)
            of_data = data.digests(model.name, part.fold)
            yield Training(
                model=model,
                part=part,
                made_of={**of_data, **settings},
                command=tuple(command),
                from_base=from_base,
            )


def _users_command(files: TrainingDir, data: TrainingData, model: MemberConfig, part: Part) -> list[str]:
    assert model.training is not None
    values = {
        "train": str(files.train_file(part, data.suffix, model).absolute()),
        "fold": ALL_ROWS if part.fold is None else str(part.fold),
        "out": str(files.unfinished(model.name, part).absolute()),
    }
    return with_values(model.training.command or (), values)


def made_of(config: RunConfig, model: MemberConfig) -> dict[str, str]:
    """Return digests of what a member's trainings depend on beside rows; a base model that is gone is left out."""
    seed = {"seed": str(config.seed)}
    training = training_from_base(model)
    if training is not None:
        return {**seed, **training.made_of(config.labels, FileDigests(whole=config.hash_weights))}
    assert model.training is not None
    command = model.training.command or ()
    scripts = {f"the script {path}": file_sha256(path) for path in _scripts(command)}
    inputs = {"inputs": digest_of(model.input_names)} if model.input_names else {}  # and their order
    return {**seed, **inputs, "train.command": digest_of(command), **scripts}


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
    by_command = [item for item in trainings if item.from_base is None]
    by_file = {files.train_file(item.part, data.suffix, item.model): item for item in by_command}
    for file, item in by_file.items():
        data.write_for_command(file, data.rows_of(item.part.fold), item.model.name)
    to_train = {training.model.name for training in trainings}
    for model in data.members.values():
        rows = files.trained_rows(model.name)
        if model.name in to_train or not fold_count(rows):
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


def _out_of_fold(loaded: LoadedConfig, folder: Path) -> LoadedConfig:
    """Return the config of a run in ``folder``: the folds' models of trained members, over the training table.

    An input that is not trained has the predictions that its readers have learned from.
    """
    config, models = loaded.config, list[MemberConfig]()
    inputs = untrained_inputs(config)
    for model in config.models:
        if model.training is not None:
            train = model.training.model_copy(update={"predict_with": "folds"})
            models.append(model.model_copy(update={"train": train, "calibration": None}))
        elif model.name in inputs:
            activation = learned_activation(config)
            path = TrainingDir(config.output_dir).oof(model.name)
            keys = {"name": model.name, "path": path, "activation": activation}
            models.append(KINDS.load("csv").Settings.model_validate(keys))
    data = config.training_data
    return derived_run(loaded, models, folder, data=data, fill="uniform", training=None)


def _demand_one_fold(prepared: Prepared) -> None:
    """Raise a DataError if a row of the table is in no fold of a member, so that every model would predict it."""
    for name in prepared.loaded.trained:
        jobs = jobs_of(prepared.models, name)
        rows = [prepared.job_rows[job.name] for job in jobs if job.name in prepared.job_rows]
        strange = int(np.all(rows, axis=0).sum()) if rows else prepared.table.rows
        if strange:
            raise DataError(
                f"{prepared.config.data.path}: {plural(strange, 'row')} of it {name} was not trained on; run "
                "`ensemble train CONFIG` again, which trains on the table as it is now"
            )
