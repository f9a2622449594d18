"""The kind ``csv``: predictions that were made elsewhere."""
