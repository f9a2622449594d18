"""Define the base of all mappings of a config."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from ensemble.config.document import KeyProblems, Problem


class StrictConfig(BaseModel):
    """A mapping of known keys; the base class also for mappings in the keys of a kind or a merge method."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,  # a value may come from an environment variable
        protected_namespaces=(),
        defer_build=True,  # at first use: with its search for plugins, pydantic would slow down --help
    )

    # By key, what people type instead out of habit, separated by spaces; only what is not similar to the key.
    older_keys: ClassVar[Mapping[str, str]] = {}
    # Pairs of keys of which one excludes the other: a model's own key replaces the other one of the defaults, and a
    # later file's key that of an earlier file.
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        """Yield a place below this mapping and a sentence without a value for each broken rule between keys.

        ``labels`` are the config's; empty if they are unknown.
        """
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Take a null for a missing key; an unknown key stays, to be refused."""
        if not isinstance(values, dict):
            return values
        return {
            key: value for key, value in values.items() if value is not None or key not in cls.model_fields
        }

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        # In one validator, because pydantic stops after the first validator that fails.
        problems = [*self.broken_rules(info.context or ())]
        if problems:
            raise KeyProblems(problems)
        return self
