"""Metrics that are means over groups of rows, against scikit-learn's of each group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from ensemble.common.errors import DataError
from ensemble.data.table import DistinctCells
from ensemble.merging.metrics import LabelledRows, UndefinedMetric, find_metric
from ensemble.merging.scoring import Bootstrap
from tests.labelled import labelled

ROWS = 1_200
RULES = ("a", "b", "c", "rare")


def grouped(known: LabelledRows, numbers: Any) -> LabelledRows:
    return replace(known, groups={"rule": DistinctCells("rule", numbers, RULES)})


def sample(labels: int = 2) -> tuple[LabelledRows, Any]:
    """Rows in groups of other sizes, of which the last lacks a label, with many equal values."""
    random = np.random.default_rng(4)
    groups = random.choice(4, ROWS, p=[0.5, 0.3, 0.15, 0.05])
    truth = random.integers(0, labels, ROWS)
    truth[groups == 3] = 0
    scores = random.normal(size=(ROWS, labels)) + 1.2 * np.eye(labels)[truth]
    values = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return grouped(labelled(truth), groups), random.multinomial(10, values) / 10


def by_group(known: LabelledRows, folds: Any = None) -> list[Any]:
    keys = known.groups["rule"].numbers + 4 * (0 if folds is None else folds)
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]


def auc(truth: Any, values: Any) -> float:
    return float(np.mean([sk.roc_auc_score(truth == k, values[:, k]) for k in range(values.shape[1])]))


@pytest.mark.parametrize("labels", [2, 3])
def test_the_mean_is_of_the_groups_that_have_each_label(labels: int) -> None:
    known, values = sample(labels)
    truth: Any = known.truth
    parts = by_group(known)
    metric = find_metric("auc", group="rule")
    of_each = [auc(truth[rows], values[rows]) for rows in parts[:3]]
    assert metric.value(known, values) == pytest.approx(np.mean(of_each), abs=1e-12)
    partition = metric.partition(known, values)
    assert partition is not None
    assert partition.text == "the mean over 3 groups by column 'rule'; not defined in 1 more: 'rare'"
    losses = [sk.log_loss(truth[rows], values[rows], labels=range(labels)) for rows in parts]
    metric = find_metric("log_loss", group="rule")
    assert metric.value(known, values) == pytest.approx(np.mean(losses), abs=1e-12)
    f1 = [sk.f1_score(truth[rows], values[rows].argmax(axis=1), average="macro") for rows in parts]
    metric = find_metric("macro_f1", group="rule")
    assert metric.value(known, values) == pytest.approx(np.mean(f1), abs=1e-12)


def test_rows_are_ranked_within_their_group_and_the_fold_of_their_model() -> None:
    known, values = sample()
    folds, truth = np.arange(ROWS) % 3, np.asarray(known.truth)
    known = replace(known, folds=folds)
    of_each = [auc(truth[rows], values[rows]) for rows in by_group(known, folds) if truth[rows].any()]
    assert len(of_each) == 9
    metric = find_metric("auc", group="rule")
    assert metric.value(known, values) == pytest.approx(np.mean(of_each), abs=1e-12)
    partition = metric.partition(known, values)
    assert partition is not None
    names = ", ".join(f"'rare' in fold {fold}" for fold in range(3))
    assert (
        partition.text == f"the mean over 9 groups by column 'rule' and fold; not defined in 3 more: {names}"
    )
    # Other metrics have no use for folds.
    right = [(truth[rows] == values[rows].argmax(axis=1)).mean() for rows in by_group(known)]
    assert find_metric("accuracy", group="rule").value(known, values) == pytest.approx(
        np.mean(right), abs=1e-12
    )


def test_the_truth_alone_decides_which_groups_count() -> None:
    """Two sure members are compared on the same groups, although one says the same in all rows of a group."""
    known, values = sample()
    always = np.where(known.groups["rule"].numbers[:, None] == 0, [[1.0, 0.0]], values)
    metric = find_metric("cohen_kappa", group="rule")
    for sides in ((always, values), (values, always)):
        bootstrap = Bootstrap(known)
        scores = [bootstrap.score(metric, side) for side in sides]
        for score in scores:
            assert score.partition is not None
            assert score.partition.undefined == ("'rare'",)


@pytest.mark.parametrize("name", ["auc", "accuracy"])
def test_the_interval_is_that_of_rows_drawn_within_groups(name: str) -> None:
    known, values = sample()
    truth, random = np.asarray(known.truth), np.random.default_rng(1)
    metric = find_metric(name, group="rule")
    score = Bootstrap(known).score(metric, values)
    assert score.value == pytest.approx(metric.value(known, values), abs=1e-12)
    drawn = []
    for _ in range(150):
        rows = np.concatenate([random.choice(part, len(part)) for part in by_group(known)])
        drawn.append(metric.value(known.taken(rows), values[rows]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (score.interval.low, score.interval.high) == pytest.approx((low, high), abs=0.2 * (high - low))
    assert truth[known.groups["rule"].numbers == 3].max() == 0


def test_many_small_groups_have_an_interval_although_resamples_lack_labels() -> None:
    random = np.random.default_rng(2)
    truth = np.tile([0, 0, 0, 1], 300)
    values = random.random((ROWS, 2)) + 0.3 * np.eye(2)[truth]
    known = replace(
        labelled(truth), groups={"q": DistinctCells("q", np.arange(ROWS) // 4, tuple(map(str, range(300))))}
    )
    interval = Bootstrap(known).score(find_metric("auc", group="q"), values).interval
    assert interval.low < interval.value < interval.high


def test_groups_that_cannot_be_scored_are_refused() -> None:
    known, values = sample()
    metric = find_metric("auc", group="rule")
    alike = replace(known, groups={"rule": DistinctCells("rule", np.zeros(ROWS, np.int64), ("x",))})
    with pytest.raises(
        DataError, match=r"auc by rule: column 'rule' is 'x' in every row; name a column with"
    ):
        metric.value(alike, values)
    with pytest.raises(UndefinedMetric, match="not defined in any part"):
        metric.value(known.taken(slice(0)), values[:0])
    rows = np.flatnonzero(known.true_labels == 0)
    with pytest.raises(UndefinedMetric, match="auc by rule: not defined in any part of the rows, by column"):
        metric.value(known.taken(rows), values[rows])
