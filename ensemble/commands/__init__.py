"""What the commands besides `run`, `validate` and `plan` do."""
