"""Start workers on the nodes of a Ray cluster: the launcher ``ray``."""
