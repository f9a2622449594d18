"""Predictions made elsewhere, read from a CSV."""
