"""Predict each row of the training table by models that have not seen it, in an ordinary run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from ensemble.common.errors import RESUMES, DataError, TimeLimitReached
from ensemble.common.files import atomic_path, remove_temporary_files
from ensemble.common.text import plural
from ensemble.config import LoadedConfig, MemberConfig
from ensemble.jobs.job import jobs_of
from ensemble.pipeline.ending import raise_unless_complete
from ensemble.pipeline.load import derived_run
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import Display, run_prepared
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.training_dir import TrainingDir


def predict_held_out(
    loaded: LoadedConfig, display: Display, began: float, owns_process: bool = True
) -> RunReport:
    """Predict the rows that each fold holds out, and write ``oof/<member>.csv`` of members that have all of them.

    The run has its own directory, ``training/oof``, and resumes there. Its ensemble is the plain mean of the
    trained members.

    Args:
        loaded: the config as it was loaded, with members that have ``train``.
        began: when the command began, by ``boot_seconds``; ``time_limit`` is counted from there.

    Raises:
        EnsembleError: of exit code 2 if a member is not trained, or if the table is not the one of its training;
            else as ``pipeline.run.run``.
    """
    files = TrainingDir(loaded.config.output_dir)
    prepared = prepare(_out_of_fold(loaded, files.oof_run), is_for_run=True)
    try:
        _demand_one_fold(prepared)
    except DataError:
        prepared.launcher.close()
        raise
    report = run_prepared(prepared, display, False, began, owns_process)
    for member in report.members:
        if member.status == "complete":
            target = files.oof(member.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_temporary_files(target)
            with atomic_path(target) as temporary:
                shutil.copyfile(RunDir(files.oof_run).predictions(member.name), temporary)
    return report


def raise_unless_predicted(report: RunReport) -> None:
    """Raise ``TimeLimitReached`` or ``MembersFailed`` if ``oof/`` lacks a member."""
    if report.status == "time_limit":
        raise TimeLimitReached(
            f"stopped at time_limit, before all rows were predicted by models that have not seen them; {RESUMES}"
        )
    raise_unless_complete(report)


def _out_of_fold(loaded: LoadedConfig, output_dir: Path) -> LoadedConfig:
    """Return the config of the run: the folds' models of trained members, over the training table."""
    models: list[MemberConfig] = []
    for model in loaded.config.trained_members:
        assert model.training is not None
        train = model.training.model_copy(update={"predict_with": "folds"})
        models.append(model.model_copy(update={"train": train, "calibration": None}))
    data = loaded.config.training_data
    return derived_run(loaded, models, output_dir, data=data, fill="uniform", training=None)


def _demand_one_fold(prepared: Prepared) -> None:
    """Raise a DataError if a row of the table is in no fold of a member, so that every model would predict it."""
    for model in prepared.config.models:
        jobs = jobs_of(prepared.models, model.name)
        rows = [prepared.job_rows[job.name] for job in jobs if job.name in prepared.job_rows]
        strange = int(np.all(rows, axis=0).sum()) if rows else prepared.table.rows
        if strange:
            raise DataError(
                f"{prepared.config.data.path}: {plural(strange, 'row')} of it {model.name} was not trained on; run "
                "`ensemble train CONFIG` again, which trains on the table as it is now"
            )
