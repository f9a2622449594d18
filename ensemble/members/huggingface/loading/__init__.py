"""Child side: a checkpoint's files -> tokenizer and model on their device."""
