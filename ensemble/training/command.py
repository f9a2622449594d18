"""Train all members that have ``train``: a training for each of their folds that has not ended well yet."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ensemble.common.clock import boot_seconds
from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import RESUMES, CheckpointError, ConfigError, MembersFailed
from ensemble.common.files import write_text
from ensemble.common.python_process import python_command
from ensemble.common.shards import file_sha256
from ensemble.common.text import listed, plural, shown_path
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.config.training import PLACEHOLDERS
from ensemble.data.trained_rows import write_trained_rows
from ensemble.members.huggingface.checkpoint.digests import hub_commit, tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.hub import find_file
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.registry import member_kind
from ensemble.pipeline.held_out import fold_count
from ensemble.pipeline.run import Display
from ensemble.pipeline.run_dir import RunDir, head, hold, logging_to, system_errors_in
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.training.check import check_trainings
from ensemble.training.data import TrainingData, read_training_data, training_files
from ensemble.training.jobs import Training, TrainingRun
from ensemble.training.layout import Part, TrainingDir, parts_of
from ensemble.training.records import Seal, TrainingReport, read_record
from ensemble.training.seal import why_to_train
from ensemble.training.trained import is_trained, missing_parts, with_trained

_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
# What {fold} is for a training on all rows.
ALL_ROWS = "-1"
_TRAINER, _HEAD = "ensemble.training.child.trainer", "ensemble.training.child.head"
_MICRO_BATCH = 8
# Of a run's time limit, the part that is kept for predictions and for writing.
_PREDICTING_SHARE = 0.2
# Of the time that is left, the part between two saves: what a time limit ends goes on from the last one.
_SAVING_SHARE = 0.1
_SAVE_SECONDS = 60.0  # without a limit
# Keys of train that change no model, or nothing beyond rounding.
_NO_OTHER_MODEL = {"command", "base_model", "num_gpus", "predict_with", "per_device_train_batch_size"}
# The same of the settings of a member's workers.
_OF_PREDICTION = frozenset(
    "model_name_or_path revision view_adapters view_templates merge_adapter asked batch_size token_budget "
    "device_map max_memory offload_folder expandable_segments max_split_size_mb torch_compile bytes_per_token "
    "bytes_per_token_pair fixed_bytes width".split()
)


def train(
    loaded: LoadedConfig,
    display: Display,
    fold: int | None = None,
    fresh: bool = False,
    owns_process: bool = True,
    ends_at: float | None = None,
) -> TrainingReport:
    """Train the members of a config; what an earlier command has trained of the same is kept.

    Members with a ``failure`` in the report lack trainings; all others are complete, unless the time was over.

    Args:
        fold: only this one, of all members; None: all.
        fresh: train anew what is trained already.
        ends_at: when all must have stopped, by ``boot_seconds``; None: no limit.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 if the directory is in use, 1 if the disk is
            full.
        Interrupted: a signal came.
    """
    config = loaded.config
    if not config.trained_members:
        raise ConfigError("models: no member has train, so that there is nothing to train; give it to one")
    for warning in check_trainings(loaded):
        display.say(warning)
    data = read_training_data(loaded)
    if fold is not None and not 0 <= fold < data.splits:
        raise ConfigError(f"--fold: the folds are 0 to {data.splits - 1}, not {fold}")
    display.say(
        f"{shown_path(config.training_data.path)}: {plural(data.rows, 'row')} in {plural(data.splits, 'fold')}"
    )
    for remark in data.remarks:
        display.say(remark)
    rundir, files = RunDir(config.output_dir), TrainingDir(config.output_dir)
    with system_errors_in("the training"):
        rundir.create()
        with hold(rundir), heed_signals(owns_process) as signals:
            files.tidy()
            files.train_log.parent.mkdir(parents=True, exist_ok=True)
            with logging_to(files.train_log, loaded.redactor):
                return _train(loaded, display, signals, data, fold, fresh, ends_at)


def train_for_run(
    loaded: LoadedConfig, display: Display, began: float, owns_process: bool = True
) -> LoadedConfig:
    """Train what a run lacks, and return its config with ordinary members in place of those that are trained.

    A member that fails, or for which there is no time, is in ``untrained``: it fails in the run, too.

    Args:
        began: when the run began, by ``boot_seconds``: ``time_limit`` is for trainings and predictions together.

    Raises:
        MembersFailed: a member failed, and neither on_member_failure nor a time limit asks for results without it.
        EnsembleError: as for ``train``.
    """
    config = loaded.config
    if not config.trained_members:
        return loaded
    remark = _taken_as_sealed(loaded)
    if remark:
        display.say(remark)
        return with_trained(loaded)
    ends_at = None
    if config.time_limit is not None:
        ends_at = began + (1.0 - _PREDICTING_SHARE) * config.time_limit
    report = train(loaded, display, owns_process=owns_process, ends_at=ends_at)
    if config.on_member_failure == "fail" and ends_at is None:
        raise_unless_trained(report)
    failures = {member.name: member.failure for member in report.members}
    untrained = {}
    for model in config.trained_members:
        missing = ", ".join(part.text for part in missing_parts(loaded, model))
        if missing:
            untrained[model.name] = (
                failures.get(model.name) or f"there was no time to train {missing}; {RESUMES}"
            )
            display.say(f"{model.name} is left out: {untrained[model.name]}")
    out_of_time = frozenset(name for name in untrained if not failures.get(name))
    loaded = with_trained(loaded, may_lack=True)
    return replace(loaded, untrained=untrained, out_of_time=out_of_time)


def preview_trainings(loaded: LoadedConfig) -> list[str]:
    """Check all that shows before a training begins, its tables included, and return sentences for the user.

    Raises:
        EnsembleError: of exit code 2, with the problems.
    """
    if not loaded.config.trained_members:
        return []
    remark = _taken_as_sealed(loaded)
    if remark:
        return [remark]
    return [*check_trainings(loaded), *read_training_data(loaded).remarks]


def raise_unless_trained(report: TrainingReport) -> None:
    """Raise ``MembersFailed`` if trainings have failed."""
    failed = [member for member in report.members if member.failure]
    if failed:
        raise MembersFailed(
            [f"member {member.name} failed: {member.failure}; {RESUMES}" for member in failed]
        )


def _lost(config: RunConfig) -> str | None:
    """Return the first table or base model that is gone, of those that a training needs."""
    for path in training_files(config):
        if not path.exists():
            return shown_path(path)
    for model in config.trained_members:
        if isinstance(model, HuggingFaceSettings) and model.train is not None and model.train.base_model:
            try:
                find_file(model.train.base_model, "config.json", model.revision)
            except CheckpointError:
                return f"the base model {shown_path(Path(model.train.base_model))}"
    return None


def _taken_as_sealed(loaded: LoadedConfig) -> str:
    """Return that members are taken as they were trained, because something to train them from is gone; else "".

    Raises:
        ConfigError: a setting has changed, or a file of a checkpoint.
    """
    config, files = loaded.config, TrainingDir(loaded.config.output_dir)
    lost = _lost(config) if is_trained(loaded) else None
    if lost is None:
        return ""
    problems = []
    for model in config.trained_members:
        made_of = made_of_settings(config, model)
        with contextlib.suppress(CheckpointError):  # its base model may be gone, too
            made_of |= made_of_base(config, model)
        for part in parts_of(model, fold_count(files.trained_rows(model.name))):
            seal = read_record(files.seal(model.name, part), Seal)
            sealed = {} if seal is None else seal.made_of
            reason = why_to_train(files, model.name, part, {**sealed, **made_of})
            if reason is not None:
                reason = reason or "its seal cannot be read"
                problems.append(
                    f"{model.name}: {part.text} must be trained anew, and {lost} is gone: {reason}"
                )
    if problems:
        raise ConfigError(problems)
    return f"{lost} is gone: the members are taken as they were trained"


def _train(
    loaded: LoadedConfig,
    display: Display,
    signals: Signals,
    data: TrainingData,
    fold: int | None,
    fresh: bool,
    ends_at: float | None,
) -> TrainingReport:
    """Sort out what is trained already, write the tables of the other trainings, and run these."""
    config, files = loaded.config, TrainingDir(loaded.config.output_dir)
    trainings: list[Training] = []
    for model in config.trained_members:
        for training in _trainings(config, files, data, model):
            is_asked = fold is None or training.part.fold == fold
            reason = why_to_train(files, model.name, training.part, training.made_of)
            is_done = reason is None and not (fresh and is_asked)
            if reason or (fresh and is_asked):  # never beside a fold of another division
                files.remove(model.name, training.part)
            if reason:
                outcome = "trained anew" if is_asked else "removed"
                display.say(f"{model.name}: {training.part.text} is {outcome}: {reason}")
            if is_done or is_asked:
                trainings.append(replace(training, is_done=is_done))
        for number in range(data.splits, fold_count(files.trained_rows(model.name))):  # of another division
            files.remove(model.name, Part(number))
        names = [training.part.text for training in trainings if training.model is model and training.is_done]
        if names:
            display.say(f"{model.name}: trained already: {listed(names, 10, str)}")
    data.write_folds(files.folds)
    lacking = [training for training in trainings if not training.is_done]
    _write_data(config, files, data, lacking, ends_at)
    return TrainingRun(loaded, trainings, display, signals, data.file_states, ends_at).run()


def _trainings(
    config: RunConfig, files: TrainingDir, data: TrainingData, model: MemberConfig
) -> Iterator[Training]:
    """Yield a member's trainings, with the commands that do them."""
    train = model.training
    assert train is not None
    made_of = {**made_of_settings(config, model), **made_of_base(config, model)}
    for part in parts_of(model, data.splits):
        values = {
            "train": str(files.train_file(part, data.suffix).absolute()),
            "fold": ALL_ROWS if part.fold is None else str(part.fold),
            "out": str(files.unfinished(model.name, part).absolute()),
        }
        program = _HEAD if train.method == "head" else _TRAINER
        command = [*python_command(program), str(files.spec(model.name, part).absolute())]
        if train.command is not None:
            command = [_PLACEHOLDER.sub(lambda match: values[match[1]], text) for text in train.command]  # noqa: B023
        yield Training(
            model=model,
            part=part,
            command=tuple(command),
            is_built_in=train.command is None,
            made_of={"the training table": data.digest(part, model.name), **made_of},
        )


def _scripts(command: Sequence[str]) -> Iterator[Path]:
    """Yield the scripts that a command names: files that end in .py, and a program that begins with ``#!``."""
    for text in command:
        path = Path(text)
        if (path.suffix == ".py" and path.is_file()) or (text is command[0] and head(path).startswith(b"#!")):
            yield path


def made_of_settings(config: RunConfig, model: MemberConfig) -> dict[str, str]:
    """Return digests of the settings that a training depends on."""
    train = model.training
    assert train is not None
    if train.command is not None:
        scripts = {f"the script {path}": file_sha256(path) for path in _scripts(train.command)}
        return {"seed": str(config.seed), "train.command": digest_of(train.command), **scripts}
    keys = train.model_dump(mode="json", exclude=_NO_OTHER_MODEL)
    return {"seed": str(config.seed), **{f"train.{key}": digest_of(value) for key, value in keys.items()}}


def made_of_base(config: RunConfig, model: MemberConfig) -> dict[str, str]:
    """Return digests of the base model and of how its member reads rows; none of a member with a command.

    Raises:
        CheckpointError: the base model is not found.
    """
    train = model.training
    assert train is not None
    if train.command is not None:
        return {}
    settings = _settings(config, model)
    member = settings["member"]
    folder = find_file(str(train.base_model), "config.json", member["revision"]).parent
    files = FileDigests(whole=config.hash_weights)
    base = [
        hub_commit(str(train.base_model), folder),
        weights_digest(folder, member["model_kwargs"], None, member["trust_remote_code"], files),
        tokenizer_digest(folder, member["tokenizer_kwargs"], files),
    ]
    reading = {key: value for key, value in member.items() if key not in _OF_PREDICTION}
    return {
        "the base model": digest_of(base),
        "how the member reads rows": digest_of({**settings, "member": reading}),
    }


def _settings(config: RunConfig, model: MemberConfig) -> Mapping[str, Any]:
    kind = member_kind(model)
    assert isinstance(kind, TextCheckpoint)
    return kind.training_settings(config.labels)


def _write_data(
    config: RunConfig,
    files: TrainingDir,
    data: TrainingData,
    trainings: Sequence[Training],
    ends_at: float | None,
) -> None:
    """Write what the commands read: a table for each part of users' commands, and the trainer's specs."""
    for part in dict.fromkeys(training.part for training in trainings if not training.is_built_in):
        file = files.train_file(part, data.suffix)
        file.parent.mkdir(exist_ok=True)
        data.write(file, data.rows_of(part))
    for name in dict.fromkeys(training.model.name for training in trainings):
        files.spec(name, Part(None)).parent.mkdir(parents=True, exist_ok=True)
        write_trained_rows(files.trained_rows(name), data.trained_rows(name))
    built_in = [training for training in trainings if training.is_built_in]
    if not built_in:
        return
    table = data.publish(files.root / "data")
    for part in dict.fromkeys(training.part for training in built_in):
        data.write_rows(part, files.train_file(part, ".npz"))
    for training in built_in:
        train = training.model.training
        assert train is not None
        size = train.per_device_train_batch_size
        spec = {
            "table": str(table.absolute()),
            "rows": str(files.train_file(training.part, ".npz").absolute()),
            "out": str(files.unfinished(training.model.name, training.part).absolute()),
            "labels": config.labels,
            "seed": config.seed,
            "settings": _settings(config, training.model),
            "train": train.model_dump(mode="json"),
            "micro_batch": min(_MICRO_BATCH, train.effective_batch_size) if size == "auto" else size,
        }
        if ends_at is not None:
            spec["save_seconds"] = min(_SAVE_SECONDS, _SAVING_SHARE * max(0.0, ends_at - boot_seconds()))
        if train.method == "head":
            spec["features"] = str(files.features.absolute())
        write_text(files.spec(training.model.name, training.part), json.dumps(spec))
