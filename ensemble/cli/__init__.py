"""Define the command line: commands, progress, and views of runs."""
