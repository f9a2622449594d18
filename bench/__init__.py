"""What this project's speed is measured against, and the measuring: ``make bench``.  Not part of the package."""
