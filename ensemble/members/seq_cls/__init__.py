"""Sequence classifiers: Hugging Face checkpoints with a classification head."""
