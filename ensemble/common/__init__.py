"""Code that all rooms share, in the parent and in workers."""
