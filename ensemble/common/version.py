"""Hold the version of this package; ``scripts/release.py`` compares it with the tag."""

__version__ = "0.1.0"
