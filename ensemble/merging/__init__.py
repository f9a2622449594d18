"""Merge members' values: blocks, checks, calibration, rules, merge methods and scores."""
