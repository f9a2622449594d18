"""What kinds of member that run Hugging Face checkpoints share."""
