"""Image classifiers: paths in a column, read with Pillow, through a checkpoint with a head of the labels."""
