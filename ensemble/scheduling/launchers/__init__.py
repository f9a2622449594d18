"""Launchers, which start workers: a module or a folder for each."""
