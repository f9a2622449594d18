"""Find the rows that a member was trained on, and choose for each one the models that have not seen it.

A model of fold f has learned from all rows outside the fold. Rows are recognized by digests of the cells that the
member reads, so that a row of the training table is known in any other table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ensemble.common.text import plural, were
from ensemble.config import LoadedConfig, TrainedMember
from ensemble.data.digests import RowDigests, find_rows, with_another
from ensemble.data.row_files import FileCells
from ensemble.data.table import InputTable
from ensemble.data.trained_rows import IN_ALL_FOLDS, read_trained_rows
from ensemble.pipeline.run_dir import work_of_view

# Stands for the fold of a row that no model was trained on.
NEW: Final = -2
_Rows = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HeldOut:
    """Hold which rows views of trained members compute.

    Attributes:
        rows: by work, such as ``gemma@fold-0``, the rows that its model may predict, bool [rows]; other works: all.
        remarks: how many rows a member was trained on, in words.
    """

    rows: Mapping[str, _Rows] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def fold_count(path: Path) -> int:
    """Return the number of folds in a file of trained rows; 0 if there is no such file."""
    return int(read_trained_rows(path).folds.max(initial=-1)) + 1 if path.is_file() else 0


def folds_of(path: Path, digests: RowDigests) -> npt.NDArray[np.int64]:
    """Return the fold whose model has not seen a row, ``IN_ALL_FOLDS`` or ``NEW``, int64 [rows].

    In the training table itself each row has its own fold; in other tables a row that stands in several folds has
    been seen by every model.
    """
    stored = read_trained_rows(path)
    if np.array_equal(digests, stored.digests[: len(digests)]):
        return stored.folds[: len(digests)]
    folds = np.where(with_another(stored.digests, stored.folds), IN_ALL_FOLDS, stored.folds)
    positions = find_rows(digests, stored.digests)
    return np.where(positions >= 0, folds[positions], NEW)


def held_out(
    loaded: LoadedConfig,
    table: InputTable,
    columns: Mapping[str, tuple[str, ...]],
    files: Mapping[str, FileCells],
) -> tuple[LoadedConfig, HeldOut]:
    """Return which rows trained members' views compute, and the config with a view for each fold that is needed.

    A row that is new goes to every fold's model, or to the single model that predicts for all of them; a row of the
    training table goes to the model of its fold; a row that all models have seen counts as new, with a remark.

    ``columns`` are those that each member reads in any of its views, ``files`` those that name files.
    """
    config = loaded.config
    models, rows, remarks = list(config.models), dict[str, _Rows](), list[str]()
    for number, model in enumerate(models):
        trained = loaded.trained.get(model.name)
        if trained is None:
            continue
        folds = folds_of(trained.rows, table.row_digests(columns[model.name], files.get(model.name)))
        # The run that makes out-of-fold predictions has no ``training``: these rows are what it is for.
        remarks += _remarks(model.name, folds, is_expected=config.training is None)
        if (folds >= 0).any():
            models[number] = trained.by_fold
            rows |= _rows_of_views(trained, folds)
    config = config.model_copy(update={"models": tuple(models)})
    return replace(loaded, config=config), HeldOut(rows, tuple(remarks))


def _rows_of_views(trained: TrainedMember, folds: npt.NDArray[np.int64]) -> dict[str, _Rows]:
    model, has_whole = trained.by_fold, None in trained.folds.values()
    rows = {}
    for number, view in enumerate(model.counted_views):
        fold = trained.folds[view.name]
        is_seen_by_none = folds < 0
        selected = is_seen_by_none if fold is None else folds == fold
        if fold is not None and not has_whole:
            selected = selected | is_seen_by_none
        rows[work_of_view(model, number)] = selected
    return rows


def _remarks(name: str, folds: npt.NDArray[np.int64], is_expected: bool) -> list[str]:
    """Return how many rows a member was trained on; if that ``is_expected``, only those of all folds."""
    rows, held = plural(len(folds), "row"), int((folds >= 0).sum())
    seen, remarks = int((folds == IN_ALL_FOLDS).sum()), []
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
