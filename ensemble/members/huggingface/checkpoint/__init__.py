"""Inspect the files of checkpoints and adapters without loading them."""
