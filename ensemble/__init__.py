"""Ensembles of big Hugging Face models over one table, each model in a process of its own."""

__version__ = "0.1.0"
