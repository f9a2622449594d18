"""Provide the kind ``command``: a program of the user, which predicts the rows of a file."""
