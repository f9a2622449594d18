"""``make test-gpu``: say which packages are missing, or run the checks, which import them."""

from __future__ import annotations

import sys

from bench.gpu.packages import why_not

if __name__ == "__main__":
    problem = why_not()
    if problem:
        sys.exit(f"FAILED: {problem}")
    from tests.gpu.checks import main

    sys.exit(main())
