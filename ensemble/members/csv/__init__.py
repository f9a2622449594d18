"""Provide the kind ``csv``: predictions that were made elsewhere."""
