"""``python -m bench.fit_halves``: is ``fit --method auto`` as good on rows that it never saw?

Each table that comes with scikit-learn has members of several sorts, which predict its rows out of fold.  Twenty
times its rows are split into two halves at random: each way is fitted to one half, and scored on the other.  Prints
a table for docs/reference/benchmark-tables.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.stats import ttest_rel
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from bench.rounds import say
from bench.table import plain_table
from ensemble.analysis.fit import Options, blend_fitter, fit, fit_calibrations
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.weights import WeightedBlend
from ensemble.merging.metrics import find_metric

HALVES = 20
AUTO, BEST, EQUAL = "auto", "best member", "equal weights"
# Enough for stacking: 10 rows in a half for each number.
_WAYS: Mapping[str, Options] = {
    "simplex": Options(),
    "greedy": Options(method="greedy"),
    "simplex of the geometric mean": Options(pool="geometric_mean"),
    "simplex with temperatures": Options(calibration="temperature"),
    "stacking": Options(method="stacking"),
}
Losses = npt.NDArray[np.float64]


def tables() -> dict[str, Predictions]:
    """Two labels, three labels, and two with members that are all of one sort and hardly differ."""
    forest = RandomForestClassifier(50, random_state=0)
    sorts = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1_000)),
        "forest": forest,
        "neighbours": make_pipeline(StandardScaler(), KNeighborsClassifier(15)),
        "bayes": GaussianNB(),
        "tree": DecisionTreeClassifier(min_samples_leaf=5, random_state=0),
    }
    forests = {f"forest{seed}": RandomForestClassifier(50, random_state=seed) for seed in range(4)}
    cancer, digits = load_breast_cancer(return_X_y=True), load_digits(return_X_y=True)
    return {
        "two labels (breast cancer)": _predictions(cancer[0], cancer[1], sorts),
        "two labels, four forests": _predictions(cancer[0], cancer[1], forests),
        "three labels (digits modulo 3)": _predictions(digits[0], digits[1] % 3, sorts),
        "ten labels (digits)": _predictions(digits[0], digits[1], sorts),
    }


def _predictions(inputs: Any, truth: Any, models: Mapping[str, Any]) -> Predictions:
    members = {
        name: np.asfortranarray(cross_val_predict(model, inputs, truth, cv=5, method="predict_proba"))
        for name, model in models.items()
    }
    ids = pa.chunked_array([pa.array([str(row) for row in range(len(truth))])])
    labels = tuple(str(label) for label in np.unique(truth))
    return Predictions(ids, labels, members, dict.fromkeys(members, "softmax"), np.asarray(truth, np.int64))


def log_losses(truth: Any, values: Any) -> Losses:
    """Return the log loss of each row, as scikit-learn has it."""
    eps = np.finfo(np.float64).eps
    return np.asarray(-np.log(np.clip(values[np.arange(len(truth)), truth], eps, 1 - eps)))


def merged_by_auto(fitted: Predictions, scored: Predictions) -> Any:
    """Return what ``--method auto`` of the first rows merges of the others, float64 [rows, labels]."""
    report = fit(fitted, Options(method="auto"))
    settings = {member.name: member.calibration for member in report.members}
    values = [*scored.as_merged(settings).members.values()]
    if report.stacking is not None:
        return report.stacking.merge(values)
    weights = np.array([member.weight for member in report.members])
    return WeightedBlend(weights, report.options.pool, "softmax").merge(values)


def merged_by(options: Options, fitted: Predictions, scored: Predictions) -> Any:
    """Return the same of another method, without its cross-validation."""
    settings = fit_calibrations(fitted, options)
    members, values = ([*part.as_merged(settings).members.values()] for part in (fitted, scored))
    return blend_fitter(members, fitted, options, find_metric(options.metric))(None).merge(values)


def held_out_halves(
    predictions: Predictions, halves: int, ways: Mapping[str, Options]
) -> list[dict[str, Losses]]:
    """Return for each split the losses of each way on the half that it was not fitted to, [rows]."""
    random, found = np.random.default_rng(0), []
    for _ in range(halves):
        order = random.permutation(predictions.rows)
        fitted, scored = (predictions.taken(rows) for rows in np.array_split(order, 2))
        alone = {name: log_losses(fitted.truth, values).mean() for name, values in fitted.members.items()}
        values = {
            BEST: scored.members[min(alone, key=lambda name: alone[name])],
            EQUAL: np.mean([*scored.members.values()], axis=0),
        }
        for name, options in ways.items():
            values[name] = merged_by(options, fitted, scored)
        values[AUTO] = merged_by_auto(fitted, scored)
        found.append({name: log_losses(scored.truth, part) for name, part in values.items()})
    return found


def is_worse(losses: Losses, others: Losses) -> bool:
    """Return whether the first is worse by more than noise: a paired t-test at 5 %."""
    return bool(losses.mean() > others.mean() and ttest_rel(losses, others).pvalue < 0.05)


def compare(halves: int) -> list[dict[str, object]]:
    """Return a row for each table and way: its log loss, and in how many halves auto is better or worse."""
    rows: list[dict[str, object]] = []
    for title, predictions in tables().items():
        say(f"{title} ...")
        # A way that needs more rows than the half has is left out.
        labels, members = len(predictions.labels), len(predictions.members)
        is_enough = predictions.rows // 2 >= 10 * (members * labels + 1) * (labels - 1)
        ways = {name: way for name, way in _WAYS.items() if is_enough or way.method != "stacking"}
        found = held_out_halves(predictions, halves, ways)
        for name in found[0]:
            is_auto = name == AUTO
            rows.append(
                {
                    "table": title,
                    "way": name,
                    "log loss": f"{np.mean([half[name].mean() for half in found]):.4f}",
                    "auto better": "" if is_auto else sum(is_worse(half[name], half[AUTO]) for half in found),
                    "auto worse": "" if is_auto else sum(is_worse(half[AUTO], half[name]) for half in found),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--halves", type=int, default=HALVES)
    print(plain_table(compare(parser.parse_args().halves)))


if __name__ == "__main__":
    main()
