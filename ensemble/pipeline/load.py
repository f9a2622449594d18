"""Load configs with the installed merge methods and member kinds, and derive the configs of other runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ensemble.common.extensions import SettingsByName
from ensemble.config import ConfigSource, EnsembleConfig, LoadedConfig, MemberConfig, load_config
from ensemble.members.registry import KINDS
from ensemble.merging.methods import METHODS
from ensemble.pipeline.remote import with_copies
from ensemble.pipeline.trained_members import with_trained

# What a config says of its own results and of its weights.
_OF_RESULTS = ("submission", "rules", "limit", "fitted_on", "copy_to", "report_to", "metrics")


def load(
    sources: Path | Sequence[ConfigSource],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> LoadedConfig:
    """Read and check a config (see ``load_config``), and copy in what it names by address (see ``with_copies``)."""
    source_list = [sources] if isinstance(sources, Path) else sources
    methods, kinds = SettingsByName(METHODS), SettingsByName(KINDS)
    return with_copies(load_config(source_list, overrides, methods, kinds, environ, texts))


def derived_run(
    loaded: LoadedConfig, models: Iterable[MemberConfig], output_dir: Path, **changes: object
) -> LoadedConfig:
    """Return the config of another run of these members, which is no run of the config's own results.

    Each member computes all rows and has a weight of 1; trained members are ordinary ones. There are no rules, no
    submission and no copies elsewhere, and the ensemble is the plain mean, unless ``changes``, keys of the config,
    say otherwise.

    Raises:
        ConfigError: a member is not trained.
    """
    members = tuple(model.without_when().model_copy(update={"weight": 1.0}) for model in models)
    with_members = loaded.config.model_copy(update={"models": members})
    loaded = with_trained(replace(loaded, config=with_members, submission_address=None))
    keys = {**dict.fromkeys(_OF_RESULTS), "ensemble": EnsembleConfig(), "output_dir": output_dir, **changes}
    return replace(loaded, config=loaded.config.model_copy(update=keys))
