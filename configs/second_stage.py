"""A second stage: gradient boosting on the probabilities of other members, and on the length of the text.

Both halves of a member of configs/second_stage.yaml: the program that trains it, and the function that predicts.
By hand:  python configs/second_stage.py --train TABLE --out FOLDER
"""

import argparse
from pathlib import Path

import joblib
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier

from ensemble.members.python.child import Context


def features(rows: pd.DataFrame) -> pd.DataFrame:
    """What it learns from: the columns of its inputs, such as gemma2/time, and how long the gloss is."""
    probabilities = rows[[name for name in rows.columns if "/" in name]].astype(float)
    return probabilities.assign(length=rows["gloss"].str.len())


def setup(context: Context) -> HistGradientBoostingClassifier:
    """Called once in each process: the model of a fold, from the folder that its training has left."""
    return joblib.load(context.model / "model.joblib")


def predict(rows: pd.DataFrame, context: Context) -> pd.DataFrame:
    """The probabilities of some rows; the index of these holds the ids."""
    model = context.state
    return pd.DataFrame(model.predict_proba(features(rows)), index=rows.index, columns=model.classes_)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on a table with the out-of-fold predictions of others."
    )
    parser.add_argument("--train", required=True, help="a CSV of the rows to train on")
    parser.add_argument("--out", required=True, help="the folder that gets the model")
    options = parser.parse_args()
    table = pd.read_csv(options.train, dtype=str, keep_default_na=False)
    # Or LightGBM: LGBMClassifier(n_estimators=60, learning_rate=0.05, max_depth=2, reg_lambda=1.0, random_state=0)
    model = HistGradientBoostingClassifier(
        max_iter=60, learning_rate=0.05, max_depth=2, l2_regularization=1.0, random_state=0
    )
    model.fit(features(table), table["label"])
    joblib.dump(model, Path(options.out) / "model.joblib")


if __name__ == "__main__":
    main()
