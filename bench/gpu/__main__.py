"""``make bench-gpu``: say which packages are missing, or measure, which imports them."""

from __future__ import annotations

import sys

from bench.gpu.packages import why_not

if __name__ == "__main__":
    problem = why_not()
    if problem:
        sys.exit(f"Nothing was measured: {problem}.")
    from bench.gpu.measuring import main

    sys.exit(main())
