"""Make the two labelled tables of jigsaw_42nd_train.yaml from the competition's folder.

    python prepare_jigsaw.py /kaggle/input/jigsaw-agile-community-rules /kaggle/working

jigsaw_train.csv is train.csv with a column `label`, Yes or No. jigsaw_examples.csv holds the examples of test.csv
as rows of their own: those that break the rule are Yes, the others No.
"""

import sys
from pathlib import Path

import pandas as pd


def examples(test: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each different example and rule; its prompt shows the other example of its side."""
    parts = []
    for side, label in (("positive", "Yes"), ("negative", "No")):
        for number, other in ((1, 2), (2, 1)):
            part = test.copy()
            part["body"] = test[f"{side}_example_{number}"]
            part[f"{side}_example_1"] = test[f"{side}_example_{other}"]
            part[f"{side}_example_2"] = ""
            part["label"] = label
            parts.append(part)
    rows = pd.concat(parts, ignore_index=True)
    # What stands on both sides of a rule has no label.
    sides = rows.groupby(["body", "rule"])["label"].transform("nunique")
    rows = rows[sides == 1].drop_duplicates(["body", "rule"], ignore_index=True)
    rows["row_id"] = [f"example_{number}" for number in range(len(rows))]
    return rows


def main() -> None:
    competition, folder = map(Path, sys.argv[1:])
    train, test = (
        pd.read_csv(competition / name, dtype=str, keep_default_na=False)
        for name in ("train.csv", "test.csv")
    )
    train["label"] = train["rule_violation"].map({"1": "Yes", "0": "No"})
    train.to_csv(folder / "jigsaw_train.csv", index=False)
    examples(test).to_csv(folder / "jigsaw_examples.csv", index=False)


if __name__ == "__main__":
    main()
