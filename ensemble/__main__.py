"""``python -m ensemble`` and the ``ensemble`` command: what must happen before the first import, then the CLI."""

from __future__ import annotations

import gc
import os

# Imports make a few hundred thousand objects that all stay: looking through them again and again for garbage is
# a sixth of the start-up time.  This only makes collections rarer.
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


def main() -> None:
    """Run the command line."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    # pydantic would search every installed distribution for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from ensemble.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
