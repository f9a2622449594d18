"""Decide which worker starts where, which chunk it gets, and what follows from a fault."""
