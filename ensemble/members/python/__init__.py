"""Provide the kind ``python``: a function that the user writes."""
