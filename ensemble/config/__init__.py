"""Turn YAML files into a checked ``RunConfig``, or report all wrong keys together.

Nothing here looks at the table, the checkpoints or the GPUs; only ``trust_remote_code`` asks whether
``model_name_or_path`` is a local folder.
"""

from __future__ import annotations

from ensemble.config.load import (
    ConfigSource,
    LoadedConfig,
    MappingConfig,
    TrainedMember,
    load_config,
    mapping_config,
)
from ensemble.config.schema import (
    CalibrationConfig,
    DataConfig,
    EnsembleConfig,
    FittingConfig,
    InputsConfig,
    MemberConfig,
    ReaderConfig,
    RunConfig,
    SubmissionConfig,
    TuningConfig,
    ViewConfig,
)
from ensemble.config.values import StrictConfig

__all__ = [
    "CalibrationConfig",
    "ConfigSource",
    "DataConfig",
    "EnsembleConfig",
    "FittingConfig",
    "InputsConfig",
    "LoadedConfig",
    "MappingConfig",
    "MemberConfig",
    "ReaderConfig",
    "RunConfig",
    "StrictConfig",
    "SubmissionConfig",
    "TrainedMember",
    "TuningConfig",
    "ViewConfig",
    "load_config",
    "mapping_config",
]
