"""Find the rows that a member was trained on, and choose for each one the models that have not seen it.

A model of fold f has learned from all rows outside the fold. Rows are recognized by digests of the cells that the
member reads, so that a row of the training table is known in any other table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ensemble.common.text import plural, were
from ensemble.config import LoadedConfig, MemberConfig, TrainedMember
from ensemble.data.row_files import FileCells
from ensemble.data.table import InputTable
from ensemble.data.trained_rows import IN_ALL_FOLDS, folds_of

_Rows = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HeldOut:
    """Hold which rows views of trained members compute.

    Attributes:
        rows: by member, for each view the rows that its model may predict, bool [views, rows]; other members: all.
        remarks: how many rows a member was trained on, in words.
    """

    rows: Mapping[str, _Rows] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def held_out(
    loaded: LoadedConfig,
    table: InputTable,
    columns: Mapping[str, tuple[str, ...]],
    files: Mapping[str, FileCells],
) -> tuple[LoadedConfig, HeldOut]:
    """Return the config with a view for each fold that is needed, and which rows trained members' views compute.

    A row that is new goes to every fold's model, or to the single model that predicts for all of them; a row of the
    training table goes to the model of its fold; a row that all models have seen counts as new, with a remark.

    ``columns`` are those that each member reads in any of its views, ``files`` those that name files.
    """
    models: list[MemberConfig] = []
    rows: dict[str, _Rows] = {}
    remarks: list[str] = []
    for model in loaded.config.models:
        trained = loaded.trained.get(model.name)
        if trained is not None:
            folds = folds_of(trained.rows, table.row_digests(columns[model.name], files.get(model.name)))
            # The run that makes out-of-fold predictions has no ``training``: these rows are what it is for.
            remarks += _remarks(model.name, folds, is_expected=loaded.config.training is None)
            if (folds >= 0).any():
                model = trained.by_fold
                rows[model.name] = _rows_of_views(trained, folds)
        models.append(model)
    config = loaded.config.model_copy(update={"models": tuple(models)})
    return replace(loaded, config=config), HeldOut(rows, tuple(remarks))


def _rows_of_views(trained: TrainedMember, folds: npt.NDArray[np.int64]) -> _Rows:
    """Return for each view the rows that its model may predict, bool [views, rows]."""
    counts_as_new = folds < 0
    has_model_for_new = None in trained.folds.values()
    rows: list[_Rows] = []
    for view in trained.by_fold.counted_views:
        fold = trained.folds[view.name]
        if fold is None:
            rows.append(counts_as_new)
        elif has_model_for_new:
            rows.append(folds == fold)
        else:
            rows.append((folds == fold) | counts_as_new)
    return np.array(rows)


def _remarks(name: str, folds: npt.NDArray[np.int64], is_expected: bool) -> list[str]:
    """Return how many rows a member was trained on; if that ``is_expected``, only those of all folds."""
    rows = plural(len(folds), "row")
    held = int((folds >= 0).sum())
    seen = int((folds == IN_ALL_FOLDS).sum())
    remarks: list[str] = []
    if held and not is_expected:
        remarks.append(
            f"{name}: {held:,} of {rows} {were(held)} trained on; the model of the fold that has not seen a row "
            "predicts it"
        )
    if seen:
        remarks.append(
            f"{name}: {seen:,} of {rows} {were(seen)} trained on in every fold; all of its models have seen them"
        )
    return remarks
