"""Load a checkpoint in the child: files -> tokenizer and model on their device."""
