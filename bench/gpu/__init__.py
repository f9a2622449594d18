"""How much of a GPU this project uses: ``make bench-gpu``."""
