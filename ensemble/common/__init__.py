"""Hold the code that all rooms share, in the parent and in workers."""
