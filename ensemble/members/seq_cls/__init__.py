"""Provide the kind ``seq_cls``: a Hugging Face model for sequence classification."""
