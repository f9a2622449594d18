"""One module per way to merge members' probabilities."""
