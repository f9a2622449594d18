"""What a run will take and where it goes, before anything loads."""
