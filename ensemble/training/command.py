"""Train all members that have ``train``: a training for each of their folds that has not ended well yet."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ensemble.common.digests import digest_of
from ensemble.common.errors import RESUMES, ConfigError, EnsembleError, MembersFailed, WriteError
from ensemble.common.files import FileState, file_state
from ensemble.common.text import listed, plural, shown_path
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.config.training import PLACEHOLDERS, TrainConfig
from ensemble.pipeline.run import Display
from ensemble.pipeline.run_dir import RunDir, hold, logging_to
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.training.data import TrainingData, read_training_data
from ensemble.training.jobs import Training, TrainingRun
from ensemble.training.layout import Part, TrainingDir
from ensemble.training.records import TrainingReport
from ensemble.training.seal import why_to_train

_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
# What {fold} is for a training on all rows.
ALL_ROWS = "-1"


def train(
    loaded: LoadedConfig,
    display: Display,
    fold: int | None = None,
    fresh: bool = False,
    owns_process: bool = True,
) -> TrainingReport:
    """Train the members of a config; what an earlier command has trained of the same is kept.

    If the report has ``failures``, these members lack trainings; all others are complete.

    Args:
        fold: only this one, of all members; None: all.
        fresh: train anew what is trained already.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 if the directory is in use, 1 if the disk is
            full.
        Interrupted: a signal came.
    """
    config = loaded.config
    if not config.trained_members:
        raise ConfigError("models: no member has train, so that there is nothing to train; give it to one")
    watched = _watched(config)
    data = read_training_data(loaded)
    if fold is not None and not 0 <= fold < data.splits:
        raise ConfigError(f"--fold: the folds are 0 to {data.splits - 1}, not {fold}")
    display.say(
        f"{shown_path(config.training_data.path)}: {plural(data.rows, 'row')} in {plural(data.splits, 'fold')}"
    )
    for remark in data.remarks:
        display.say(remark)
    rundir, files = RunDir(config.output_dir), TrainingDir(config.output_dir)
    try:
        rundir.create()
        with hold(rundir), heed_signals(owns_process) as signals:
            files.train_log.parent.mkdir(parents=True, exist_ok=True)
            with logging_to(files.train_log, loaded.redactor):
                return _train(loaded, display, signals, data, watched, fold, fresh)
    except OSError as error:  # from anything but writing a file, such as making a folder
        if error.filename is None:
            raise EnsembleError(
                f"the training ended with an error of the system ({type(error).__name__}: {error}); {RESUMES}"
            ) from error
        raise WriteError(
            f"cannot write to {error.filename} ({error.strerror}); free it or change output_dir"
        ) from error


def raise_unless_trained(report: TrainingReport) -> None:
    """Raise ``MembersFailed`` if trainings have failed."""
    failed = [member for member in report.members if member.failure]
    if failed:
        raise MembersFailed(
            [f"member {member.name} failed: {member.failure}; {RESUMES}" for member in failed]
        )


def _train(
    loaded: LoadedConfig,
    display: Display,
    signals: Signals,
    data: TrainingData,
    watched: Mapping[str, FileState],
    fold: int | None,
    fresh: bool,
) -> TrainingReport:
    """Sort out what is trained already, write the tables of the other trainings, and run these."""
    config, files = loaded.config, TrainingDir(loaded.config.output_dir)
    kept: list[Training] = []
    lacking: list[Training] = []
    for model in config.trained_members:
        assert model.training is not None
        for part in _parts(model.training, data.splits, fold):
            training = _training(config, files, data, model, part)
            reason: str | None = ""
            if fresh:
                files.remove(model.name, part)
            else:
                reason = why_to_train(files, model.name, part, training.made_of)
            (kept if reason is None else lacking).append(training)
            if reason:
                display.say(f"{model.name}: {part.text} is trained anew: {reason}")
    for model in config.trained_members:
        names = [training.part.text for training in kept if training.model is model]
        if names:
            display.say(f"{model.name}: trained already: {listed(names, 10, str)}")
    for part in dict.fromkeys(training.part for training in lacking if not training.is_built_in):
        file = files.train_file(part, config.training_data.path.suffix)
        file.parent.mkdir(exist_ok=True)
        data.write_part(part, file)
    for training in lacking:
        files.unfinished(training.model.name, training.part).parent.mkdir(parents=True, exist_ok=True)
    return TrainingRun(loaded, [*kept, *lacking], lacking, display, signals, watched).run()


def _parts(train_config: TrainConfig, splits: int, fold: int | None) -> list[Part]:
    """Return what a member is trained on."""
    if fold is not None:
        return [Part(fold)]
    parts = [Part(number) for number in range(splits)]
    return [*parts, Part(None)] if train_config.predict_with == "refit" else parts


def _training(
    config: RunConfig, files: TrainingDir, data: TrainingData, model: MemberConfig, part: Part
) -> Training:
    """Return the training of a member on a part, with the command that does it."""
    train_config = model.training
    assert train_config is not None
    made_of = {"the training table": data.digest(part), "seed": str(config.seed)}
    if train_config.command is None:
        raise ConfigError(f"models[{config.models.index(model)}].train: needs a command")
    made_of |= {"train.command": digest_of(train_config.command)}
    values = {
        "train": str(files.train_file(part, config.training_data.path.suffix).absolute()),
        "fold": ALL_ROWS if part.fold is None else str(part.fold),
        "out": str(files.unfinished(model.name, part).absolute()),
    }
    command = [_PLACEHOLDER.sub(lambda match: values[match[1]], text) for text in train_config.command]
    return Training(model=model, part=part, command=tuple(command), is_built_in=False, made_of=made_of)


def _watched(config: RunConfig) -> dict[str, FileState]:
    """Return the states of the tables that are learned, by path."""
    paths = [config.training_data.path]
    if config.training is not None:
        paths += [table.path for table in config.training.extra or ()]
        paths += filter(None, [config.training.labels])
    states = {str(path.absolute()): file_state(path) for path in paths}
    return {path: state for path, state in states.items() if state is not None}
