"""The road of a run: validate, plan, schedule, merge, report."""
