"""Evaluate predictions: metrics, weights, comparisons, the report; with pandas, SciPy and scikit-learn.

Imported by its own commands only, never in a run.
"""
