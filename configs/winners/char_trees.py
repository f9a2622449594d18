"""A member of semeval_task13.yaml: boosted trees over TF-IDF of characters, trained when the run reaches it."""

import pandas as pd
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import Pipeline, make_pipeline

from ensemble.members.python.child import Context


def setup(context: Context) -> Pipeline:
    """Train on the first rows of a table whose column label has the labels' numbers."""
    train = pd.read_parquet(context.kwargs["train"])[: context.kwargs["rows"]]
    grams = TfidfVectorizer(
        analyzer="char", ngram_range=(3, 5), max_features=10_000, min_df=2, sublinear_tf=True
    )
    # With the package xgboost: XGBClassifier(n_estimators=..., max_depth=6, learning_rate=0.1), on all processors.
    trees = GradientBoostingClassifier(
        n_estimators=context.kwargs["trees"], max_depth=6, learning_rate=0.1, random_state=context.seed
    )
    return make_pipeline(grams, trees).fit(train["code"], train["label"])


def predict(frame: pd.DataFrame, context: Context) -> pd.DataFrame:
    """Return the labels' probabilities; a label that training has not seen has none."""
    model = context.state
    made = pd.DataFrame(model.predict_proba(frame["code"]), index=frame.index, columns=model.classes_)
    made = made.reindex(columns=range(len(context.labels)), fill_value=0.0)
    return made.set_axis(context.labels, axis=1)
