"""Estimate the memory of a checkpoint on a device from its files."""
