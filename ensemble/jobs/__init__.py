"""Compile members into jobs: what the rest of a run plans, schedules and resumes."""
