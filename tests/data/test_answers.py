"""Answers by hand, and their scores held against scikit-learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, cohen_kappa_score, f1_score, ndcg_score

from ensemble.common.protocol import Activation
from ensemble.config.schema import AnswerConfig
from ensemble.data.answers import Answer, compile_format, halfway, scored_together
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.table import InputTable
from ensemble.merging.metrics import METRICS, answer_scores, find_metric
from tests.labelled import labelled

VALUES = np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
TEXTS = ("a", "b", "c")
MANY = Answer(texts=tuple("abcdefg"), above=(0.2,) * 7, at_least=2)


def cells(answer: Answer, values: np.ndarray = VALUES) -> list[object]:
    made: list[object] = answer.cells(values, None, np.arange(len(values))).to_pylist()
    return made


def test_ties_go_to_the_first_label_and_zeros_are_left_out() -> None:
    assert cells(Answer(texts=TEXTS)) == ["b", "a", "b", "a"]
    assert cells(Answer(texts=TEXTS, top=2)) == ["b c", "a c", "b", "a"]
    assert cells(Answer(texts=TEXTS, top=3, separator="")) == ["bca", "acb", "b", "a"]


def test_numbers_are_rounded_halfway_unless_thresholds_say_otherwise() -> None:
    numbers = (1.0, 2.0, 4.0)
    assert halfway(numbers) == (1.5, 3.0)
    # Expected numbers 2.4, 2.4 and 2.
    assert cells(Answer(texts=TEXTS, numbers=numbers, thresholds=halfway(numbers)), VALUES[:3]) == [2, 2, 2]
    assert cells(Answer(texts=TEXTS, numbers=numbers, thresholds=(2.0, 2.3)), VALUES[:3]) == [4, 4, 2]
    assert cells(Answer(texts=TEXTS, numbers=(0.5, 1.0, 2.5), thresholds=(0.7, 9.0)), VALUES[:1]) == [1.0]


def test_an_expected_number_that_equals_a_threshold_gets_the_higher_answer() -> None:
    values = np.array([[0.7, 0.0, 0.3], [0.1, 0.2, 0.7]])  # 1.6 and 2.6, and in floating point a little less
    assert (values @ [1, 2, 3] < [1.6, 2.6]).all()
    assert cells(Answer(texts=TEXTS, numbers=(1.0, 2.0, 3.0), thresholds=(1.6, 2.6)), values) == [2, 3]


def test_the_value_of_a_single_label_is_the_expected_number() -> None:
    answer = Answer(texts=("score",), numbers=(1.0, 2.0, 3.0), thresholds=(1.5, 2.5))
    values = np.array([[-7.0], [1.5], [2.4], [9.0]])
    assert cells(answer, values) == [1, 2, 2, 3]
    truth = np.array([[1.0], [1.0], [2.0], [3.0]])
    score = answer_scores(answer, labelled(truth, "none"), values)
    assert score["accuracy"] == 0.75
    kappa = cohen_kappa_score([1, 2, 2, 3], [1, 1, 2, 3], weights="quadratic")
    assert score["quadratic_kappa"] == pytest.approx(kappa, abs=1e-12)


@pytest.mark.parametrize("numbers", [(1.0, 2.0, 5.0, 20.0), (1.0, 20.0, 2.0, 5.0)])
def test_the_kappa_is_that_of_scikit_learn_by_places_of_rising_numbers(numbers: tuple[float, ...]) -> None:
    random = np.random.default_rng(6)
    values, truth = random.dirichlet(np.full(4, 0.2), 300), random.integers(0, 4, 300)
    answer = Answer(texts=tuple("abcd"), numbers=numbers, thresholds=halfway(numbers))
    answers, true = cells(answer, values), np.array(numbers)[truth].astype(int)
    nearest = [
        min(sorted(numbers), key=lambda number: (abs(number - mean), -number)) for mean in values @ numbers
    ]
    assert answers == nearest
    kappa = cohen_kappa_score(answers, true, labels=sorted(map(int, numbers)), weights="quadratic")
    assert answer_scores(answer, labelled(truth), values)["quadratic_kappa"] == pytest.approx(
        kappa, abs=1e-12
    )


def test_a_number_that_equals_a_threshold_of_endless_digits_gets_the_higher_answer() -> None:
    values = np.array([[2 / 3, 1 / 3], [1 - 1 / 3, 1 / 3]])
    assert cells(Answer(texts=TEXTS, numbers=(1.0, 2.0), thresholds=(4 / 3,)), values) == [2, 2]
    halves = Answer(texts=TEXTS, numbers=(0.1, 0.2), thresholds=halfway((0.1, 0.2)))
    assert cells(halves, np.array([[0.5, 0.5]])) == [0.2]
    single = Answer(texts=("score",), numbers=(0.0, 1.0), thresholds=(0.3,))
    assert cells(single, np.array([[0.1 + 0.2], [1 - 0.7]])) == [1, 1]


def test_a_format_stands_around_each_label() -> None:
    answer = Answer(texts=TEXTS, top=2, template=compile_format("{{ sign }}{{ answer }}"))
    signs = pa.table({"sign": ["?", "+", None]})
    table = InputTable(signs, pa.chunked_array([["x", "y", "z"]]), None, {})
    assert answer.cells(VALUES[:2], table, np.array([1, 2])).to_pylist() == ["+b +c", "a c"]
    assert answer.columns == ("sign",)
    alone = Answer(texts=TEXTS, template=compile_format("<{{ answer }}>"))
    assert cells(alone) == ["<b>", "<a>", "<b>", "<a>"]
    with pytest.raises(TemplateProblem, match=r"lacks \{\{ answer \}\}"):
        compile_format("{{ sign }}")


def test_scores_of_answers_are_those_of_the_metrics() -> None:
    random = np.random.default_rng(3)
    values, truth = random.dirichlet(np.ones(5), 300), random.integers(0, 5, 300)
    texts = tuple("abcde")
    first = answer_scores(Answer(texts=texts), labelled(truth), values)
    assert first["accuracy"] == pytest.approx(METRICS["accuracy"].value(labelled(truth), values), abs=1e-12)
    third = answer_scores(Answer(texts=texts, top=3), labelled(truth), values)
    for name in ("map@3", "ndcg@3"):
        expected = find_metric(name).value(labelled(truth), values)
        assert third[name] == pytest.approx(expected, abs=1e-12)
    assert third["mrr"] == third["map@3"], "of a single true label"
    soft = random.dirichlet(np.ones(5), 300)
    of_soft = answer_scores(Answer(texts=texts, top=3), labelled(soft), values)
    expected = METRICS["map@3"].value(labelled(soft), values)
    assert of_soft["map@3"] == pytest.approx(expected, abs=1e-12)


def test_scores_of_labels_that_do_not_exclude_each_other() -> None:
    random = np.random.default_rng(4)
    values, truth = random.random((200, 4)), random.integers(0, 2, (200, 4)).astype(np.float64)
    truth[:, 0] = 1.0
    texts = tuple("abcd")
    score = answer_scores(Answer(texts=texts), labelled(truth, "sigmoid"), values)
    assert score["accuracy"] == truth[np.arange(200), values.argmax(axis=1)].mean()
    score = answer_scores(Answer(texts=texts, top=4), labelled(truth, "sigmoid"), values)
    expected = np.mean([average_precision_score(*pair) for pair in zip(truth, values, strict=True)])
    assert score["map@4"] == pytest.approx(expected, abs=1e-12)
    assert score["ndcg@4"] == pytest.approx(ndcg_score(truth, values), abs=1e-12)
    places = (-values).argsort(axis=1).argsort(axis=1) + 1
    expected = np.mean([1 / row[is_true > 0].min() for row, is_true in zip(places, truth, strict=True)])
    assert score["mrr"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("answer", [Answer(texts=tuple("abcdefg"), top=4), MANY])
def test_many_rows_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    values = np.random.default_rng(5).dirichlet(np.ones(7), 50).round(1)
    whole = cells(answer, values)
    monkeypatch.setattr("ensemble.data.answers._BLOCK_CELLS", 21)
    assert cells(answer, values) == whole


FLAGS = np.array([[0.5, 0.2, 0.9], [0.1 + 0.2, 0.0, 0.31], [0.0, 0.0, 0.0], [0.1, 0.45, 0.2]])


def test_labels_from_their_thresholds_on() -> None:
    assert cells(Answer(texts=TEXTS, above=(0.5, 0.5, 0.5)), FLAGS) == ["a c", "", "", ""]
    # 0.1 + 0.2 is a little more than 0.3, and both count as equal; a probability of 0 is never above.
    assert cells(Answer(texts=TEXTS, above=(0.3, 0.0, 1.0), none="-"), FLAGS) == ["a b", "a", "-", "b"]
    assert cells(Answer(texts=TEXTS, above=(0.1 + 0.2, 1.0, np.inf)), np.array([[0.3, 1.0, 1.0]])) == ["a b"]
    one = Answer(texts=("1", "1", "1"), above=(np.inf, np.inf, 0.31), none="0")
    assert cells(one, FLAGS) == [1, 1, 0, 0]


def test_a_threshold_of_0_is_one() -> None:
    assert AnswerConfig(above=0).label_thresholds("x", TEXTS) == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert AnswerConfig(above=0).label_thresholds("b", TEXTS) == {"b": 0.0}


def test_the_likeliest_labels_are_added_where_few_are_above() -> None:
    answer = Answer(texts=TEXTS, above=(0.6, 0.1, 0.95), at_least=1)
    assert cells(answer, FLAGS) == ["b", "c", "", "b"]
    assert cells(replace(answer, at_least=2), FLAGS) == ["b c", "a c", "", "b c"]
    assert cells(replace(answer, above=(np.inf, 0.1, 0.95)), FLAGS) == ["b", "c", "", "b"]


def test_a_format_stands_around_what_is_written_without_a_label() -> None:
    answer = Answer(texts=TEXTS, above=(0.5, 0.5, 0.5), none="no", template=compile_format("<{{ answer }}>"))
    assert cells(answer, FLAGS) == ["<a> <c>", "<no>", "<no>", "<no>"]
    assert cells(replace(answer, none=""), FLAGS) == ["<a> <c>", "", "", ""]


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_scores_of_decisions_are_those_of_scikit_learn(activation: Activation) -> None:
    random = np.random.default_rng(8)
    values = random.dirichlet(np.full(4, 0.5), 200).round(2)
    if activation == "softmax":
        truth: np.ndarray = random.integers(0, 3, 200)  # the last label is missing
        true = truth[:, None] == np.arange(4)
    else:
        truth = (random.random((200, 4)) < 0.1 * np.arange(4)).astype(float)
        true = truth > 0.5
    answer = Answer(texts=tuple("abcd"), above=(0.3, np.inf, 0.2, 0.9))
    chosen = [0, 2, 3]
    above = (values >= [0.3, 9, 0.2, 0.9])[:, chosen]
    score = answer_scores(answer, labelled(truth, activation), values)
    assert score["accuracy"] == pytest.approx(accuracy_score(true[:, chosen], above), abs=1e-12)
    for average in ("macro", "micro"):
        expected = f1_score(true[:, chosen], above, average=average, zero_division=0)
        assert score[f"{average}_f1"] == pytest.approx(expected, abs=1e-12)
    one = answer_scores(replace(answer, above=(0.3, *[np.inf] * 3)), labelled(truth, activation), values)
    assert one == {
        "accuracy": pytest.approx(accuracy_score(true[:, 0], above[:, 0]), abs=1e-12),
        "macro_f1": pytest.approx(f1_score(true[:, 0], above[:, 0], zero_division=0), abs=1e-12),
    }


def test_columns_of_one_label_each_are_scored_together() -> None:
    first, second = (
        Answer(texts=TEXTS, above=above) for above in ((0.2, np.inf, np.inf), (np.inf, np.inf, 0.4))
    )
    whole = Answer(texts=TEXTS, above=(0.5, 0.5, 0.5))
    together = scored_together({"x": first, "all": whole, "y": second})
    assert [*together] == ["all", "x, y"]
    assert together["x, y"].above == (0.2, np.inf, 0.4)
    assert scored_together({"x": first, "y": replace(first, above=(0.3, np.inf, np.inf))}).keys() == {
        "x",
        "y",
    }


def test_a_single_answer_has_no_kappa() -> None:
    answer = Answer(texts=("a", "b"), numbers=(0.0, 1.0), thresholds=(0.5,))
    score = answer_scores(answer, labelled(np.zeros(3, np.int64)), np.array([[0.9, 0.1]] * 3))
    assert score == {"accuracy": 1.0}
