"""The kind ``python``: a function of the user's own."""
