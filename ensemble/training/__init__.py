"""Train members by folds, and predict each row by a model that has not seen it."""
