"""Provide image classifiers: Pillow reads the paths in a column, a checkpoint with a head scores the images."""
