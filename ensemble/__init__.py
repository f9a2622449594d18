"""Ensembles of big Hugging Face models over one table, each model in a process of its own.

    import ensemble

    run = ensemble.run("config.yaml", {"limit": 100})
    run.ensemble, run.predictions("gemma2")  # pandas frames
    run.report, run.status

Everything here is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ensemble.common.version import __version__ as __version__

if TYPE_CHECKING:
    from ensemble.analysis.compare import Comparison
    from ensemble.analysis.fit import FitReport
    from ensemble.analysis.tune.tuning import Tuning
    from ensemble.api import (
        compare,
        fit,
        merge,
        open_run,
        plan,
        rehearse,
        report,
        run,
        tune,
        validate,
    )
    from ensemble.cli.notebook import Preview, Run
    from ensemble.commands.rehearse import Rehearsal
    from ensemble.commands.status import RunStatus
    from ensemble.common.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DeviceError,
        EnsembleError,
        Interrupted,
        MembersFailed,
        MergeError,
        OutputError,
        OutputInUse,
        TimeLimitReached,
        WriteError,
    )
    from ensemble.pipeline.run_report import RunReport

__all__ = [
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "DataError",
    "DeviceError",
    "EnsembleError",
    "FitReport",
    "Interrupted",
    "MembersFailed",
    "MergeError",
    "OutputError",
    "OutputInUse",
    "Preview",
    "Rehearsal",
    "Run",
    "RunReport",
    "RunStatus",
    "TimeLimitReached",
    "Tuning",
    "WriteError",
    "compare",
    "fit",
    "merge",
    "open_run",
    "plan",
    "rehearse",
    "report",
    "run",
    "tune",
    "validate",
]
_FUNCTIONS = ("compare", "fit", "merge", "open_run", "plan", "rehearse", "report", "run", "tune", "validate")
# Where the results of the functions are; all other names are errors.
_MODULES = {
    **dict.fromkeys(_FUNCTIONS, "ensemble.api"),
    "Comparison": "ensemble.analysis.compare",
    "FitReport": "ensemble.analysis.fit",
    "Preview": "ensemble.cli.notebook",
    "Rehearsal": "ensemble.commands.rehearse",
    "Run": "ensemble.cli.notebook",
    "RunReport": "ensemble.pipeline.run_report",
    "RunStatus": "ensemble.commands.status",
    "Tuning": "ensemble.analysis.tune.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "ensemble.common.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
