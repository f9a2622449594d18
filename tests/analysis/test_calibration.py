"""Temperature and vector scaling against SciPy's general solvers, and isotonic lines against scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml
from scipy.optimize import minimize
from scipy.special import log_expit, log_softmax, softmax
from sklearn.isotonic import IsotonicRegression

from ensemble.analysis.weights import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    fit_isotonic,
    fit_temperature,
    fit_vector_scaling,
)
from ensemble.config import CalibrationConfig
from ensemble.config.schema import IsotonicConfig
from ensemble.merging.calibration import EPSILON, calibrator
from tests.labelled import labelled

ROWS, LABELS = 800, 4
KINDS = ("softmax", "sigmoid")
NAMES = ("a", "b", "c", "d")


def calibrated(values: Any, settings: CalibrationConfig, kind: Any) -> Any:
    calibrate, result = calibrator(settings, kind, NAMES), values.copy(order="F")
    if calibrate is not None:  # settings that change nothing have none
        calibrate(result)
    return result


def scaled(values: Any, result: tuple[Any, Any], kind: Any) -> Any:
    scale, bias = (dict(zip(NAMES, numbers.tolist(), strict=True)) for numbers in result)
    return calibrated(values, CalibrationConfig(scale=scale, bias=bias), kind)


def sample(kind: str, is_soft: bool = False) -> tuple[Any, Any]:
    """A member whose logits are 1.7 times too large and moved, and a truth."""
    random = np.random.default_rng(3)
    logits = random.normal(size=(ROWS, LABELS)) * 2
    moved = logits * 1.7 + [0.5, 0, -0.3, 0]
    if kind == "sigmoid":
        likely = 1 / (1 + np.exp(-logits))
        truth = likely if is_soft else (random.random(likely.shape) < likely).astype(float)
        return 1 / (1 + np.exp(-moved)), truth
    likely = softmax(logits, axis=1)
    hard = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    return softmax(moved, axis=1), likely if is_soft else hard


def log_loss(values: Any, truth: Any, kind: str, scale: Any, bias: Any) -> float:
    """Written down once more, by SciPy's functions; of sigmoid members per label."""
    if truth.ndim == 1:
        truth = np.eye(LABELS)[truth]
    if kind == "sigmoid":
        scores = scale * (np.log(values) - np.log(1 - values)) + bias
        return -float((truth * log_expit(scores) + (1 - truth) * log_expit(-scores)).sum()) / ROWS
    return -float((truth * log_softmax(scale * np.log(values) + bias, axis=1)).sum()) / ROWS


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_temperature_is_the_one_of_least_log_loss(kind: Any, is_soft: bool) -> None:
    values, truth = sample(kind, is_soft)
    result = fit_temperature(values, labelled(truth, kind))
    best = minimize(
        lambda x: log_loss(values, truth, kind, np.exp(x[0]), 0), [0.0], method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-14},
    )  # fmt: skip
    assert log_loss(values, truth, kind, 1 / result, 0) <= best.fun + 1e-9
    assert result == pytest.approx(np.exp(-best.x[0]), rel=1e-4)
    assert result > 1.4
    scored = calibrated(values, CalibrationConfig(temperature=result), kind)
    assert log_loss(scored, truth, kind, 1, 0) == pytest.approx(best.fun, abs=1e-9)


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_bias_are_those_of_least_log_loss(kind: Any, is_soft: bool) -> None:
    values, truth = sample(kind, is_soft)
    start = np.repeat([1.0, 0.0], LABELS)

    def loss(x: Any) -> float:
        prior = float(np.square(x - start).sum()) / (2 * ROWS)
        return log_loss(values, truth, kind, x[:LABELS], x[LABELS:]) + prior

    fitted = fit_vector_scaling(values, labelled(truth, kind))
    best = minimize(loss, start, method="BFGS", options={"gtol": 1e-9})
    together = np.concatenate(fitted)
    assert loss(together) <= best.fun + 1e-9
    np.testing.assert_allclose(together, best.x, atol=1e-4)
    scored = scaled(values, fitted, kind)
    assert log_loss(scored, truth, kind, 1, 0) < log_loss(values, truth, kind, 1, 0) - 0.02


def test_a_member_that_knows_nothing_is_left_as_it_is() -> None:
    _, truth = sample("softmax")
    alike = np.full((ROWS, LABELS), 1 / LABELS)
    assert fit_temperature(alike, labelled(truth, "softmax")) == 1
    fitted = fit_vector_scaling(alike, labelled(truth, "softmax"))  # the biases are the labels' frequencies
    shares = np.bincount(truth) / ROWS
    np.testing.assert_allclose(scaled(alike, fitted, "softmax")[0], shares, atol=2e-3)


def test_temperatures_end_where_a_member_is_always_right_or_worse_than_chance() -> None:
    values, _ = sample("softmax")
    assert fit_temperature(values, labelled(values.argmax(axis=1), "softmax")) == MIN_TEMPERATURE
    assert fit_temperature(values, labelled(values.argmin(axis=1), "softmax")) == MAX_TEMPERATURE


@pytest.mark.parametrize("kind", KINDS)
def test_certainty_that_is_wrong_costs_a_bounded_loss(kind: Any) -> None:
    values, truth = sample(kind)
    sure = np.eye(LABELS)[values.argmax(axis=1)]  # 0 and 1, often wrong
    temperature = fit_temperature(sure, labelled(truth, kind))
    assert 5 < temperature < MAX_TEMPERATURE
    assert np.isfinite(fit_vector_scaling(sure, labelled(truth, kind))[0]).all()
    assert calibrated(sure, CalibrationConfig(temperature=temperature), kind).min() > EPSILON


def test_a_label_that_no_row_has_gets_a_bias_that_is_a_number() -> None:
    values, truth = sample("softmax")
    fitted = fit_vector_scaling(values, labelled(np.where(truth == 2, 1, truth), "softmax"))
    assert -20 < fitted[1][2] < -2
    assert scaled(values, (np.ones(LABELS), np.zeros(LABELS)), "softmax") == pytest.approx(values)


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_isotonic_lines_are_those_of_scikit_learn(kind: Any, is_soft: bool) -> None:
    values, truth = sample(kind, is_soft)
    values = values.round(2)  # many are equal
    if kind == "softmax":
        values /= values.sum(axis=1, keepdims=True)
    fresh = np.concatenate([np.random.default_rng(5).random((200, LABELS)), np.full((1, LABELS), np.nan)])
    targets = np.eye(LABELS)[truth] if truth.ndim == 1 else truth
    expected = np.stack(
        [
            IsotonicRegression(out_of_bounds="clip").fit(values[:, k], targets[:, k]).predict(fresh[:-1, k])
            for k in range(LABELS)
        ],
        axis=1,
    )
    if kind == "softmax":
        expected /= expected.sum(axis=1, keepdims=True)
    lines = fit_isotonic(values, labelled(truth, kind))
    settings = CalibrationConfig(isotonic={NAMES[label]: line for label, line in lines.items()})
    result = calibrated(fresh, settings, kind)
    assert np.abs(result[:-1] - expected).max() < 1e-12
    assert np.isnan(result[-1]).all()
    written = yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))
    assert CalibrationConfig.model_validate(written) == settings


def test_a_label_that_all_rows_lack_or_that_is_impossible_has_no_line() -> None:
    values, truth = sample("softmax")
    lines = fit_isotonic(values, labelled(np.where(truth == 3, 0, truth)))
    assert [*lines] == [0, 1, 2]
    settings = CalibrationConfig(isotonic={NAMES[label]: line for label, line in lines.items()})
    changed = np.stack([np.interp(values[:, k], line.x, line.y) for k, line in lines.items()], axis=1)
    ratio = values[:, 3] / changed.sum(axis=1)
    result = calibrated(values, settings, "softmax")
    assert result[:, 3] / result[:, :3].sum(axis=1) == pytest.approx(ratio)
    possible = np.ones(values.shape, np.bool_)
    possible[:400, 1] = False
    only_possible = fit_isotonic(values, labelled(truth, "softmax", possible))
    assert only_possible[1] == fit_isotonic(values[400:], labelled(truth[400:]))[1]
    # A row in which all lines are at 0.
    zero = IsotonicConfig(x=(0.0, 1.0), y=(0.0, 0.0))
    nothing = calibrated(values[:1], CalibrationConfig(isotonic=dict.fromkeys(NAMES, zero)), "softmax")
    assert nothing.tolist() == [[0.25] * 4]
