"""Child side: rows -> token ids -> batches -> logits."""
