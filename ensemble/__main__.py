"""``python -m ensemble``."""

from ensemble.cli import main

if __name__ == "__main__":
    main()
