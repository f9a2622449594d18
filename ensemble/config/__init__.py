"""The config: from a YAML file to a ``RunConfig`` that has been checked, or to every problem at once.

Others use what stands here and no module inside.  What a run is asked for is described in ``schema`` (the
keys), ``values`` (what a key may hold) and ``rules`` (what ties keys together).  ``load`` takes a YAML file
there: ``yamlfile`` reads it into a ``Document``, ``overrides`` puts ``--set`` and ``${NAME}`` in,
``sentences`` says in plain words what is wrong.

Nothing here looks at the table, the checkpoints or the GPUs, with one exception: ``trust_remote_code`` asks
whether ``model_name_or_path`` is a local folder.
"""

from __future__ import annotations

from ensemble.config.load import Extensions, LoadedConfig, load_config
from ensemble.config.schema import DataConfig, EnsembleConfig, MemberConfig, RunConfig, SubmissionConfig

__all__ = [
    "DataConfig",
    "EnsembleConfig",
    "Extensions",
    "LoadedConfig",
    "MemberConfig",
    "RunConfig",
    "SubmissionConfig",
    "load_config",
]
