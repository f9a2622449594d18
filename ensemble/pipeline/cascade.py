"""Members with ``when``: which rows they compute, and what share of the table a plan expects.

The rules are in ``planning.cascade``; this module applies them to the members' predictions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.protocol import Activation
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig, RunConfig
from ensemble.data.ids import ID_COLUMN
from ensemble.data.predictions_csv import (
    PredictionFile,
    demand_as_written,
    read_predictions,
)
from ensemble.members.base import Inspection
from ensemble.merging.blocks import weights_by_bin, weights_of_rows
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods.weighted_mean import scaled, weighted_mean
from ensemble.pipeline.fingerprint import changed_members, changed_sentence
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import MemberWork, values_of
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.cascade import ExpectedShare, doubts, select_rows
from ensemble.planning.plan import MemberPlan, Plan, with_rows, without_done

_Rows = npt.NDArray[np.bool_]
_Values = npt.NDArray[np.float64]


class Cascades:
    """Selects the rows of the members with ``when``: once for each, when all members that decide have ended."""

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        # The rows that a member computes, bool [rows], and how unsure each row is, [rows].
        self._selections: dict[str, tuple[_Rows, _Values]] = {}
        self._left_out: set[str] = set()
        self._needs_worker = {member.name: member.needs_worker for member in prepared.plan.members}
        self._has_when = {model.name for model in prepared.config.models if model.when is not None}
        self._ended = {
            name for name, work in works.items() if work.is_complete and name not in self._has_when
        }
        self._select()

    def rows_of(self, member: str) -> _Rows | None:
        """Return the rows that the member is to have: none before they are selected; None without ``when``."""
        if member not in self._has_when:
            return None
        if member not in self._selections:
            return np.zeros(self._prepared.table.rows, dtype=np.bool_)
        return self._selections[member][0]

    def is_selected(self, member: str) -> bool:
        return member in self._selections

    def is_covered(self, member: str) -> bool:
        """Return whether a member with ``when`` has all rows that are selected for it, in each view."""
        if member not in self._selections:
            return False
        work = self._works[member]
        is_selected = np.tile(self._selections[member][0], len(work.parts))
        return bool(work.has_rows[is_selected].all())

    def planned(self, plan: Plan, member: MemberPlan) -> MemberPlan:
        """Return a member with the chunks that are left to do of its selected rows."""
        member = with_rows(plan, member, *self._selections[member.name])
        return without_done(member, self._works[member.name].has_rows, is_timed=False)

    def end(self, member: str, is_left_out: bool = False) -> list[str]:
        """Note that a member has ended or failed, and return the members whose rows are selected by that."""
        if is_left_out:
            self._left_out.add(member)
        else:
            self._ended.add(member)
        return self._select()

    def _select(self) -> list[str]:
        selected = []
        for number, model in enumerate(self._prepared.config.models):
            if model.when is None or model.name in self._selections:
                continue
            deciders = [name for name in self._prepared.config.deciders(number) if name not in self._left_out]
            if all(self._is_decided(name) for name in deciders):
                self._selections[model.name] = self._selection_of(model.when, deciders)
                selected.append(model.name)
                is_covered = not self._needs_worker[model.name] or self.is_covered(model.name)
                if self._works[model.name].is_complete and is_covered:
                    self._ended.add(model.name)
        return selected

    def _is_decided(self, member: str) -> bool:
        return member in self._ended and (member not in self._has_when or member in self._selections)

    def _selection_of(self, when: Mapping[str, float], deciders: Collection[str]) -> tuple[_Rows, _Values]:
        ((rule, _),) = when.items()
        config, table = self._prepared.config, self._prepared.table
        models = [model for model in config.models if model.name in deciders]
        mean = np.full((table.rows, len(config.labels)), np.nan)
        activations = [self._prepared.inspected[model.name].activation for model in models]
        if models:
            values = [
                values_of(self._rundir, self._works[model.name], len(config.labels)) for model in models
            ]
            is_present = np.array([~np.isnan(member_values[:, 0]) for member_values in values])
            for present, model in zip(is_present, models, strict=True):
                rows = self.rows_of(model.name)
                if rows is not None:
                    present &= rows
            mean = _calibrated_mean(config, models, activations, values, is_present, table.text_bytes)
        doubt = doubts(rule, mean, is_exclusive=all(activation == "softmax" for activation in activations))
        return select_rows(when, doubt), doubt


def expected_shares(
    config: RunConfig,
    inspected: Mapping[str, Inspection],
    values: Mapping[str, _Values],
    ids: pa.ChunkedArray | None,
    folder: Path,
    place: str = "",
    is_named: bool = False,
) -> dict[str, ExpectedShare]:
    """Estimate the share of each member with ``when`` by predictions of the members before it, if there are any.

    Args:
        values: of members that need no worker, [rows, labels], NaN in rows that they lack.
        folder: the directory of a run, of these rows or of others, such as a labelled sample.
        place: what messages call the directory; empty: its path.
        is_named: the user has named the directory; otherwise predictions that are not by this config are left out.

    Raises:
        DataError: the user has named predictions that are not by this config, or were changed since.
    """
    place = place or f"in {shown_path(folder)}"
    files = _prediction_files(config, values, ids, folder, is_named)
    return {
        model.name: _expected_share(config, model.when, config.models[:number], inspected, files, place)
        for number, model in enumerate(config.models)
        if model.when is not None
    }


def _expected_share(
    config: RunConfig,
    when: Mapping[str, float],
    models: Sequence[MemberConfig],
    inspected: Mapping[str, Inspection],
    files: Mapping[str, PredictionFile],
    place: str,
) -> ExpectedShare:
    """Estimate the share of a member with ``when`` by the predictions of the models before it."""
    ((rule, limit),) = when.items()
    if rule == "share":
        return ExpectedShare(limit, "as when says")
    models = [model for model in models if model.has_weight]
    if any(isinstance(model.weight, tuple) for model in models):
        return ExpectedShare(1.0, "all are assumed: weights by length bin are not looked up")
    missing = [model.name for model in models if model.name not in files or model.name not in inspected]
    if missing:
        why = f"all are assumed, as there are no predictions of {' and '.join(missing)} {place}"
        return ExpectedShare(1.0, why)
    rows = max((files[model.name].ids for model in models), key=len)
    values = []
    for model in models:
        member_values, _ = files[model.name].join(rows, may_lack=True, may_have_others=True)
        values.append(member_values.copy(order="F"))
    activations = [inspected[model.name].activation for model in models]
    is_present = np.array([~np.isnan(member_values).any(axis=1) for member_values in values])
    text_bytes = np.zeros(len(rows), dtype=np.int64)
    mean = _calibrated_mean(config, models, activations, values, is_present, text_bytes)
    selected = select_rows(when, doubts(rule, mean, set(activations) == {"softmax"}))
    return ExpectedShare(float(selected.mean()), f"by the predictions of {plural(len(rows), 'row')} {place}")


def _prediction_files(
    config: RunConfig,
    values: Mapping[str, _Values],
    ids: pa.ChunkedArray | None,
    folder: Path,
    is_named: bool,
) -> dict[str, PredictionFile]:
    """Return the predictions of the members that decide, in a run's directory, else those of ``values``."""
    rundir = RunDir(folder)
    deciders = {
        name
        for number, model in enumerate(config.models)
        if model.when is not None and "share" not in model.when
        for name in config.deciders(number)
    }
    existing = sorted(name for name in deciders if rundir.predictions(name).exists())
    changed: Mapping[str, Sequence[str]] = {}
    try:
        for name in existing:
            demand_as_written(rundir.predictions(name))
        if existing:
            changed = changed_members(config, existing, folder)
    except EnsembleError:
        if is_named:
            raise
        existing = []
    if changed and is_named:
        raise DataError(
            f"--predictions-from: {folder}: {changed_sentence(changed)}; run the config there with these settings "
            "first, or leave the option out"
        )
    files: dict[str, PredictionFile] = {}
    for name in deciders:
        path = rundir.predictions(name)
        if name in existing and name not in changed:
            with contextlib.suppress(DataError):
                file = read_predictions(path)
                if file.labels == config.labels and len(file.ids):
                    files[name] = file
                    continue
        if name in values and ids is not None:
            files[name] = PredictionFile(path, ID_COLUMN, config.labels, ids, values[name])
    return files


def _calibrated_mean(
    config: RunConfig,
    models: Sequence[MemberConfig],
    activations: Sequence[Activation],
    values: Sequence[_Values],
    is_present: _Rows,
    text_bytes: npt.NDArray[np.int64],
) -> _Values:
    """Return the weighted mean of members, [rows, labels], after calibration, which changes ``values``.

    These are NaN where ``is_present``, bool [members, rows], is False.
    """
    for model, activation, member_values in zip(models, activations, values, strict=True):
        calibrate = calibrator(model.calibration, activation, config.labels)
        if calibrate is not None:
            calibrate(member_values)
    edges = config.ensemble.length_bins or ()
    weights = weights_by_bin([model.weight for model in models], config.labels, len(edges) + 1)
    weights = weights_of_rows(weights, edges, text_bytes)
    mean = weighted_mean(weights, values, is_present)
    return scaled(mean) if weights.shape[2] > 1 and set(activations) == {"softmax"} else mean
