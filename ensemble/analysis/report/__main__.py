"""Make a run's report in a process of its own: RUN_DIR PAGE PARENT_PID; its output goes to logs/report.log.

If it fails, its last line says why there is no page.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

from ensemble.common.errors import EnsembleError
from ensemble.common.packages import demand_supported
from ensemble.common.python_process import die_with_parent, keep_pandas_out
from ensemble.common.redact import Redactor, guard_output


def main() -> None:
    run_dir, page, parent = sys.argv[1:]
    die_with_parent(int(parent))
    guard_output(Redactor(os.environ))
    # Where memory is short, the kernel shall end this process and not the run.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.environ["MPLBACKEND"] = "svg"  # what the user has set may be unknown here, or need a screen
    try:
        demand_supported(for_analysis=True)
        keep_pandas_out()
        from ensemble.analysis.report.page import write_report  # with Matplotlib, which may be broken

        for problem in write_report(Path(run_dir), Path(page)):
            print(problem, file=sys.stderr)  # noqa: T201
    except EnsembleError as error:
        sys.exit("\n".join(error.problems))
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
