"""Plan what a run takes and where it runs, before anything loads."""
