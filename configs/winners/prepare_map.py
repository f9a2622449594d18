"""Add to MAP's test.csv what its winners computed from train.csv, for the configs map_*.yaml beside this file.

    python prepare_map.py /kaggle/input/map-charting-student-math-misunderstandings /kaggle/working/map_test.csv

A question's right answer is the one that most often has a label that begins with True.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd


def prepare(folder: Path) -> pd.DataFrame:
    """The test table with these columns more.

    is_correct: True or False; whether the student chose the right answer, and so what the row's label begins with.
    right_answer: of the question.
    answers, misconceptions: JSON lists of what occurs in train.csv for the question.
    family: a JSON list of all labels that begin with is_correct.
    candidates: a JSON list of the labels that fit the question: True_ and False_ with Correct, Neither, and each of
        its misconceptions.
    """
    # The texts NA and None are words here.
    train, test = (
        pd.read_csv(folder / name, dtype=str, keep_default_na=False) for name in ("train.csv", "test.csv")
    )
    train["Misconception"] = train["Misconception"].replace("", "NA")
    labels = sorted(set(train["Category"] + ":" + train["Misconception"]))
    is_right = train["Category"].str.startswith("True")
    counts = train[is_right].groupby(["QuestionId", "MC_Answer"]).size().sort_values()
    right_answers = dict(counts.index)  # of (question, answer); the last one of a question stays
    questions = train.groupby("QuestionId")
    answers = {question: as_list(rows["MC_Answer"]) for question, rows in questions}
    misconceptions = {
        question: [name for name in as_list(rows["Misconception"]) if name != "NA"]
        for question, rows in questions
    }
    test["right_answer"] = test["QuestionId"].map(right_answers)
    test["is_correct"] = (test["MC_Answer"] == test["right_answer"]).map({True: "True", False: "False"})
    test["answers"] = test["QuestionId"].map(answers).map(json.dumps)
    test["misconceptions"] = test["QuestionId"].map(misconceptions).map(json.dumps)
    families = {
        name: json.dumps([label for label in labels if label.startswith(name)]) for name in ("True", "False")
    }
    test["family"] = test["is_correct"].map(families)
    test["candidates"] = test["QuestionId"].map(misconceptions).map(candidates).map(json.dumps)
    return test


def candidates(misconceptions: Iterable[str]) -> list[str]:
    """The labels that fit a question with these misconceptions."""
    kinds = ["Correct:NA", "Neither:NA", *(f"Misconception:{name}" for name in misconceptions)]
    return [f"{is_correct}_{kind}" for kind in kinds for is_correct in ("True", "False")]


def as_list(texts: Iterable[str]) -> list[str]:
    """Different texts in alphabetical order."""
    return sorted(set(texts))


if __name__ == "__main__":
    prepare(Path(sys.argv[1])).to_csv(sys.argv[2], index=False)
