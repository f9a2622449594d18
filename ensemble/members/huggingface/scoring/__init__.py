"""Score rows in the child: rows -> token ids -> batches -> logits."""
