"""Take a run through its stages: validate, plan, schedule, merge, report."""
