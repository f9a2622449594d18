"""Predict each row of the training table by models that have not seen it, in an ordinary run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from ensemble.common.errors import DataError
from ensemble.common.files import atomic_path
from ensemble.common.text import plural
from ensemble.config import EnsembleConfig, LoadedConfig
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import Display, run_prepared
from ensemble.pipeline.run_dir import RunDir, work_of_view
from ensemble.pipeline.run_report import RunReport
from ensemble.training.layout import TrainingDir
from ensemble.training.trained import with_trained


def predict_held_out(
    loaded: LoadedConfig,
    display: Display,
    began: float,
    *,
    time_limit: float | None = None,
    owns_process: bool = True,
) -> RunReport:
    """Predict the rows that each fold holds out, and write ``oof/<member>.csv`` of members that have all of them.

    The run has its own directory, ``training/oof``, and resumes there. Its ensemble is the plain mean of the
    trained members.

    Args:
        loaded: the config as it was loaded, with members that have ``train``.
        began: when the time that ``time_limit``, in seconds, is for began, by ``boot_seconds``.

    Raises:
        EnsembleError: of exit code 2 if a member is not trained, or if the table is not the one of its training;
            else as ``pipeline.run.run``.
    """
    folder = TrainingDir(loaded.config.output_dir)
    prepared = prepare(_out_of_fold(loaded, time_limit), is_for_run=True)
    with ExitStack() as on_error:
        on_error.callback(prepared.launcher.close)
        _demand_one_fold(prepared)
        on_error.pop_all()
    report = run_prepared(prepared, display, False, began, owns_process)
    for member in report.members:
        if member.status == "complete":
            _copy(RunDir(folder.oof_run).predictions(member.name), folder.oof(member.name))
    return report


def _out_of_fold(loaded: LoadedConfig, time_limit: float | None) -> LoadedConfig:
    """Return the config of the run: the folds' models of trained members, over the training table."""
    config = loaded.config
    models = tuple(
        model.without_when().model_copy(update={"weight": 1.0, "calibration": None})
        for model in config.trained_members
    )
    trained = with_trained(
        replace(loaded, config=config.model_copy(update={"models": models}), submission_address=None),
        by_fold=True,
    )
    keys: dict[str, object] = dict.fromkeys(
        ("submission", "rules", "limit", "training", "fitted_on", "copy_to")
    )
    keys |= {"data": config.training_data, "ensemble": EnsembleConfig(), "fill": "uniform"}
    keys |= {"output_dir": TrainingDir(config.output_dir).oof_run, "time_limit": time_limit}
    return replace(trained, config=trained.config.model_copy(update=keys))


def _demand_one_fold(prepared: Prepared) -> None:
    """Raise a DataError if a row of the table is in no fold of a member, so that every model would predict it."""
    for model in prepared.config.models:
        views = np.zeros(prepared.table.rows, dtype=np.int64)  # that compute a row
        for number in range(len(model.counted_views)):
            views += prepared.view_rows.get(work_of_view(model, number), True)
        folds = len(set(prepared.loaded.trained[model.name].folds.values()))
        strange = int((views > len(model.counted_views) // folds).sum())
        if strange:
            raise DataError(
                f"{prepared.config.data.path}: {plural(strange, 'row')} of it {model.name} was not trained on; run "
                "`ensemble train CONFIG` again, which trains on the table as it is now"
            )


def _copy(source: Path, target: Path) -> None:
    content = source.read_bytes()
    if not target.is_file() or target.read_bytes() != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as temporary:
            temporary.write_bytes(content)
