"""Select the rows of members with ``when``, and expect a share of the table for the plan.

The rules are in ``planning.cascade``; this module applies them to the members' predictions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.protocol import Activation
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig, RunConfig
from ensemble.data.predictions_csv import PredictionFile, demand_as_written, read_predictions
from ensemble.members.base import Inspection
from ensemble.merging.allowed_labels import AllowedLabels
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
    """Select the rows of each member with ``when``, once the members that it waits for have ended."""

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        # The rows that a member computes, bool [rows], and how unsure each row is, [rows].
        self._selections: dict[str, tuple[_Rows, _Values]] = {}
        self._left_out: set[str] = set()
        self._has_when = {model.name for model in prepared.config.models if model.when is not None}
        self._ended = {name for name, work in works.items() if work.is_complete}
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

    def planned(self, plan: Plan, member: MemberPlan) -> MemberPlan:
        """Return a member with the chunks that are left to do of its selected rows."""
        member = with_rows(plan, member, *self._selections[member.name])
        return without_done(member, self._works[member.name].has_rows, is_timed=False)

    def end(self, member: str, is_left_out: bool = False) -> list[str]:
        """Note that a member has ended or failed, and return the members whose rows are selected by that."""
        (self._left_out if is_left_out else self._ended).add(member)
        return self._select()

    def _select(self) -> list[str]:
        selected = []
        for number, model in enumerate(self._prepared.config.models):
            if model.when is None or model.name in self._selections:
                continue
            deciders = set(self._prepared.config.deciders(number)) - self._left_out
            undecided = self._has_when - self._selections.keys()
            if deciders <= self._ended - undecided:
                self._selections[model.name] = self._selection_of(model.when, deciders)
                selected.append(model.name)
        return selected

    def _selection_of(self, when: Mapping[str, float], deciders: Collection[str]) -> tuple[_Rows, _Values]:
        ((rule, _),) = when.items()
        config, table, allowed = self._prepared.config, self._prepared.table, self._prepared.allowed_labels
        models = [model for model in config.models if model.name in deciders]
        values = [values_of(self._rundir, self._works[model.name], len(config.labels)) for model in models]
        is_present = np.array([~np.isnan(member_values[:, 0]) for member_values in values])
        for present, model in zip(is_present, models, strict=True):
            rows = self.rows_of(model.name)
            if rows is not None:
                present &= rows
        activations = [self._prepared.inspected[model.name].activation for model in models]
        mean = np.full((table.rows, len(config.labels)), np.nan)
        if models:
            mean = _calibrated_mean(
                config, models, activations, values, is_present, table.text_bytes, allowed
            )
        doubt = doubts(rule, mean, is_exclusive=set(activations) <= {"softmax"})
        return select_rows(when, doubt), doubt


def expected_shares(
    config: RunConfig,
    inspected: Mapping[str, Inspection],
    values: Mapping[str, PredictionFile],
    folder: Path,
    place: str = "",
    is_named: bool = False,
) -> dict[str, ExpectedShare]:
    """Estimate the share of each member with ``when`` by predictions of the members before it, if there are any.

    Args:
        values: of members that need no worker.
        folder: the directory of a run, of these rows or of others, such as a labelled sample.
        place: what messages call the directory; empty: its path.
        is_named: the user has named the directory: predictions in it that are not by this config are a DataError;
            otherwise they are left out.
    """
    place = place or f"in {shown_path(folder)}"
    deciders = {
        name
        for number, model in enumerate(config.models)
        if model.when is not None and "share" not in model.when
        for name in config.deciders(number)
    }
    files = dict(values)
    try:
        files |= _prediction_files(config, deciders, folder)
    except EnsembleError:
        if is_named:
            raise
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
    """Estimate the share of a member with ``when`` by the models' predictions, with all labels possible."""
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
    ids = max((files[model.name].ids for model in models), key=len)
    values = [
        files[model.name].join(ids, may_lack=True, may_have_others=True)[0].copy(order="F")
        for model in models
    ]
    activations = [inspected[model.name].activation for model in models]
    is_present = np.array([~np.isnan(member_values).any(axis=1) for member_values in values])
    mean = _calibrated_mean(config, models, activations, values, is_present, np.zeros(len(ids), np.int64))
    selected = select_rows(when, doubts(rule, mean, set(activations) == {"softmax"}))
    return ExpectedShare(float(selected.mean()), f"by the predictions of {plural(len(ids), 'row')} {place}")


def _prediction_files(config: RunConfig, members: Iterable[str], folder: Path) -> dict[str, PredictionFile]:
    """Return the predictions of members in a run's directory; a DataError says that they are not by this config."""
    rundir = RunDir(folder)
    paths = {name: rundir.predictions(name) for name in members if rundir.predictions(name).exists()}
    for path in paths.values():
        demand_as_written(path)
    changed = changed_members(config, paths, folder) if paths else {}
    if changed:
        raise DataError(
            f"--predictions-from: {folder}: {changed_sentence(changed)}; run the config there with these settings "
            "first, or leave the option out"
        )
    return {name: read_predictions(path, labels=config.labels) for name, path in paths.items()}


def _calibrated_mean(
    config: RunConfig,
    models: Sequence[MemberConfig],
    activations: Sequence[Activation],
    values: Sequence[_Values],
    is_present: _Rows,
    text_bytes: npt.NDArray[np.int64],
    allowed: AllowedLabels | None = None,
) -> _Values:
    """Return the weighted mean of members, [rows, labels], after calibration and ``allowed``.

    ``values``, which these change, are NaN where ``is_present``, bool [members, rows], is False.
    """
    for model, activation, member_values in zip(models, activations, values, strict=True):
        calibrate = calibrator(model.calibration, activation, config.labels)
        if calibrate is not None:
            calibrate(member_values)
        if allowed is not None:
            allowed.apply(0, member_values, activation == "softmax")
    edges = config.ensemble.length_bins or ()
    weights = weights_by_bin([model.weight for model in models], config.labels, len(edges) + 1)
    weights = weights_of_rows(weights, edges, text_bytes)
    mean = weighted_mean(weights, values, is_present)
    return scaled(mean) if weights.shape[2] > 1 and set(activations) == {"softmax"} else mean
