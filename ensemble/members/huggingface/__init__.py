"""Run Hugging Face checkpoints: code that these kinds of members share."""
