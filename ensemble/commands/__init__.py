"""Implement the commands besides `run`, `validate` and `plan`."""
