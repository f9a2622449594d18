"""Ask a server for the probabilities of labels, in a worker."""
