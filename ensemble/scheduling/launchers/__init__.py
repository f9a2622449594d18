"""Where worker processes run; one module per place."""
