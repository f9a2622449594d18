"""Child side: files of images -> pixels."""
