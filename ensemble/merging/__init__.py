"""Parts -> predictions -> ensemble: gathering, alignment, the weighted mean, scores."""
