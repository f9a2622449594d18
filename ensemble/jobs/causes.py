"""Identify what a job computes by digests of everything that its probabilities depend on.

A run takes over what an earlier run has computed if the causes are equal; otherwise the parts that differ say why
it computes again.  Only digests leave this module, because settings may contain secrets from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.common.digests import changed, digest_of, digests_of
from ensemble.config import MemberConfig, RunConfig
from ensemble.jobs.job import Job

# Raise it when the meaning of digests changes: causes of an older scheme are never taken for equal.
SCHEME = 5
_SETTINGS, _CONTENT, _ROWS = "settings", "content", "rows"
# The setting of a mean of jobs.
WEIGHTS = "weights of views"


@dataclass(frozen=True)
class Causes:
    """Hold everything that probabilities depend on, as hexadecimal digests by what they are of.

    Devices, replicas, chunks, batches and the member's name are in none of them.

    Attributes:
        settings: of each setting.
        content: of the member's files, by what they hold, such as "weights".
        rows: of the ids, the columns that are read, and the files that these name.
    """

    settings: Mapping[str, str] = field(hash=False)
    content: Mapping[str, str] = field(hash=False)
    rows: str

    @property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    @property
    def is_mean(self) -> bool:
        """Return whether they are those of a mean over views, see ``of_mean``."""
        return WEIGHTS in self.settings

    def changed_from(self, other: Causes) -> tuple[str, ...]:
        """Return the names of parts that differ, such as max_length, weights, tokenizer and rows.

        A member that had no views, or has none any more, has other parts: then its views are named alone.
        """
        if self.is_mean != other.is_mean:
            return ("views",)
        pairs = ((self.settings, other.settings), (self.content, other.content))
        names = [name for ours, theirs in pairs for name in (*changed(ours, theirs), *changed(theirs, ours))]
        return tuple(dict.fromkeys(names + [_ROWS] * (self.rows != other.rows)))

    def with_inputs(self, read: Mapping[str, Causes]) -> Causes:
        """Return the causes of a job that reads the predictions of these members, by name."""
        settings = {f"predictions of {name}": causes.digest for name, causes in read.items()}
        return replace(self, settings={**self.settings, **settings})

    def to_dict(self) -> dict[str, object]:
        """Return the parts as JSON can hold them, for ``from_dict``."""
        return {
            "scheme": SCHEME,
            _SETTINGS: dict(self.settings),
            _CONTENT: dict(self.content),
            _ROWS: self.rows,
        }

    @classmethod
    def from_dict(cls, document: object) -> Causes | None:
        """Read what ``to_dict`` returned; None for anything else, and for causes of another scheme."""
        if not isinstance(document, dict) or document.get("scheme") != SCHEME:
            return None
        settings, content, rows = (document.get(name) for name in (_SETTINGS, _CONTENT, _ROWS))
        if not isinstance(settings, dict) or not isinstance(content, dict):
            return None
        digests = (*settings.values(), *content.values(), rows)
        if not all(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in digests):
            return None
        return cls(settings, content, str(rows))

    @classmethod
    def of_mean(
        cls, jobs: Sequence[Job], causes: Sequence[Causes], rows: Mapping[str, npt.NDArray[np.bool_]]
    ) -> Causes:
        """Return the causes of the mean over a member's jobs, from theirs.

        ``rows`` has the rows that a job may compute, bool [rows], by its name; other jobs: all.
        """
        limited = [rows[job.name] for job in jobs if job.name in rows]
        settings = {
            "views": [of_job.digest for of_job in causes],
            WEIGHTS: [job.weight for job in jobs],
            # Then it is a mean of other jobs than of all.
            "when": not all(job.has_all_rows for job in jobs),
            "rows of folds": np.packbits(limited, axis=1).tobytes().hex() if limited else None,
        }
        return cls(digests_of(settings), {}, digest_of([of_job.rows for of_job in causes]))


def settings_of_job(config: RunConfig, job: Job, of_kind: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each setting of a job; ``of_kind`` are those of its kind of member.

    A job of a view that changes nothing has the settings of the member without views.
    """
    settings: MemberConfig = job.settings
    values = {
        **of_kind,
        "task_type": settings.task_type,
        "seed": config.seed,
        "data.id_column": config.data.id_column,
        "labels": config.labels,
        "swap": [sorted(job.swap), job.label_order] if job.swap else None,
        **({"inputs": settings.input_names} if settings.input_names else {}),
    }
    return digests_of(values)
