"""A member of configs/python.yaml: naive Bayes on TF-IDF, trained in a moment from a table of labelled rows."""

import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline

from ensemble.members.python.child import Context


def setup(context: Context) -> Pipeline:
    """Called once in each process, before the first rows; what it returns is context.state."""
    train = pd.read_csv(context.kwargs["train"], dtype=str)
    model = make_pipeline(TfidfVectorizer(sublinear_tf=True), MultinomialNB(alpha=0.03))
    return model.fit(train["gloss"], train["label"])


def predict(frame: pd.DataFrame, context: Context) -> pd.DataFrame:
    """The probabilities of a frame of some rows, whose index are the ids."""
    model = context.state
    return pd.DataFrame(model.predict_proba(frame["gloss"]), index=frame.index, columns=model.classes_)
