"""What parent and child share."""
