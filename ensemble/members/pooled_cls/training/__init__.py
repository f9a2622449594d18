"""Provide what the training of a head needs of its backbone."""
