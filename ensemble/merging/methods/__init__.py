"""Register the merge methods by their names in the config: one file and one line each."""

from __future__ import annotations

from ensemble.common.extensions import Registry
from ensemble.config import EnsembleConfig
from ensemble.merging.methods.base import Members, MergeMethod

METHODS: Registry[MergeMethod] = Registry(
    group="ensemble.merge_methods",
    what="merge method",
    base=MergeMethod,  # type: ignore[type-abstract]
    package=__name__,
    built_in={
        "mean": ".weighted_mean:WeightedMean",
        "geometric_mean": ".geometric_mean:GeometricMean",
        "logit_mean": ".geometric_mean:LogitMean",
        "median": ".median:Median",
        "power_mean": ".power_mean:PowerMean",
        "rank_mean": ".rank_mean:RankMean",
        "stacking": ".stacking:Stacking",
        "vote": ".vote:Vote",
    },
)


def merge_method(settings: EnsembleConfig, members: Members) -> MergeMethod:
    """Return the method that a config names, for one merge."""
    return METHODS.load(settings.method)(settings, members)
