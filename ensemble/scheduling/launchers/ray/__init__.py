"""The launcher ``ray``: workers on the nodes of a Ray cluster."""
