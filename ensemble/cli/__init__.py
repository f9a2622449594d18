"""What people and scripts read: progress while a run goes on, the table at its end, run.json."""
