"""Run ensembles of big Hugging Face models over one table, each model in a process of its own.

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

if TYPE_CHECKING:  # for editors and type checkers; ``_NAMES`` says the same
    from ensemble.analysis.compare import Comparison as Comparison
    from ensemble.analysis.fit import FitReport as FitReport
    from ensemble.analysis.tune import Tuning as Tuning
    from ensemble.api import compare as compare
    from ensemble.api import fit as fit
    from ensemble.api import merge as merge
    from ensemble.api import open_run as open_run
    from ensemble.api import plan as plan
    from ensemble.api import rehearse as rehearse
    from ensemble.api import report as report
    from ensemble.api import run as run
    from ensemble.api import train as train
    from ensemble.api import tune as tune
    from ensemble.api import validate as validate
    from ensemble.cli.result_objects import Preview as Preview
    from ensemble.cli.result_objects import Run as Run
    from ensemble.cli.status import RunStatus as RunStatus
    from ensemble.commands.rehearse import Rehearsal as Rehearsal
    from ensemble.common.errors import CheckpointError as CheckpointError
    from ensemble.common.errors import ConfigError as ConfigError
    from ensemble.common.errors import DataError as DataError
    from ensemble.common.errors import DeviceError as DeviceError
    from ensemble.common.errors import EnsembleError as EnsembleError
    from ensemble.common.errors import Interrupted as Interrupted
    from ensemble.common.errors import MembersFailed as MembersFailed
    from ensemble.common.errors import MergeError as MergeError
    from ensemble.common.errors import OutputError as OutputError
    from ensemble.common.errors import OutputInUse as OutputInUse
    from ensemble.common.errors import TimeLimitReached as TimeLimitReached
    from ensemble.common.errors import WriteError as WriteError
    from ensemble.pipeline.run_report import RunReport as RunReport
    from ensemble.training.records import TrainingReport as TrainingReport

_NAMES = {
    "ensemble.api": "compare fit merge open_run plan rehearse report run train tune validate",
    "ensemble.common.errors": "CheckpointError ConfigError DataError DeviceError EnsembleError Interrupted "
    "MembersFailed MergeError OutputError OutputInUse TimeLimitReached WriteError",
    "ensemble.analysis.compare": "Comparison",
    "ensemble.analysis.fit": "FitReport",
    "ensemble.analysis.tune": "Tuning",
    "ensemble.cli.result_objects": "Preview Run",
    "ensemble.commands.rehearse": "Rehearsal",
    "ensemble.cli.status": "RunStatus",
    "ensemble.pipeline.run_report": "RunReport",
    "ensemble.training.records": "TrainingReport",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
