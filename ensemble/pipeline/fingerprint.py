"""Identify a member's work by digests of everything that its probabilities depend on.

A run takes over an earlier run's work if the fingerprints are equal.  Only digests leave this module, because
settings may contain secrets from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.files import read_json
from ensemble.config import MemberConfig, RunConfig
from ensemble.data.row_files import FileCells
from ensemble.jobs.job import Job, compile_models
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.plan import ModelPlan

# Raise it when the meaning of digests changes: fingerprints of an older scheme are never taken for equal.
SCHEME = 4


@dataclass(frozen=True)
class Fingerprint:
    """Hold everything that a member's probabilities depend on; each component is a digest in hexadecimal.

    Devices, replicas, chunks, batches and the member's name are in none of them. ``content`` has the member's files
    by what they are, such as "weights"; ``rows`` is of ids, columns that are read, and files that these name.
    """

    settings: str
    content: Mapping[str, str] = field(hash=False)
    rows: str

    @property
    def digest(self) -> str:
        """Return the digest of all components."""
        return digest_of(self.to_dict())

    def changed_from(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the names of components that differ, such as settings, weights, tokenizer and rows."""
        ours, theirs = self.to_dict(), other.to_dict()
        return tuple(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))

    def to_dict(self) -> dict[str, str | int]:
        """Return the components as JSON can hold them, for ``from_dict``."""
        return {"scheme": SCHEME, "settings": self.settings, **self.content, "rows": self.rows}

    @classmethod
    def from_dict(cls, document: object) -> Fingerprint | None:
        """Read what ``to_dict`` returned; None for anything else, and for a fingerprint of another scheme."""
        if not isinstance(document, dict) or document.get("scheme") != SCHEME:
            return None
        content = {name: digest for name, digest in document.items() if name != "scheme"}
        if not all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in content.values()):
            return None
        settings, rows = content.pop("settings", None), content.pop("rows", None)
        if settings is None or rows is None:
            return None
        return cls(settings=settings, content=content, rows=rows)


def job_fingerprint(prepared: Prepared, plan: ModelPlan, job: Job, files: FileDigests) -> Fingerprint:
    """Return the fingerprint of a job's work; the table must still have its columns.

    With ``hash_weights`` every byte of the weights counts; switching it on or off counts as a change.  A job of a
    view that changes nothing has the fingerprint of the member without views.
    """
    kind, inspected = member_kind(job.settings), prepared.of_models[plan.name]
    settings = {
        **kind.fingerprint(inspected, plan.placement),
        "task_type": job.settings.task_type,
        "seed": prepared.config.seed,
        "csv": [prepared.config.data.id_column, *prepared.config.labels],
        "swap": [sorted(job.swap), job.label_order] if job.swap else None,
    }
    return Fingerprint(
        settings=digest_of(settings),
        content=kind.content(inspected, files),
        rows=prepared.table.digest(prepared.job_columns[job.name], file_cells(prepared, plan.member, job)),
    )


def file_cells(prepared: Prepared, member: str, job: Job) -> FileCells | None:
    """Return the cells that name a member's files for one of its jobs; None if it reads no files."""
    cells = prepared.files.get(member)
    return cells and replace(cells, column=job.swap.get(cells.column, cells.column))


def mean_fingerprint(
    jobs: Sequence[Job],
    fingerprints: Sequence[Fingerprint],
    rows_of_jobs: Mapping[str, npt.NDArray[np.bool_]],
) -> Fingerprint:
    """Return the fingerprint of the mean over a member's jobs, from theirs.

    ``rows_of_jobs`` has the rows that a job may compute, bool [rows], by its name; other jobs: all.
    """
    rows = [rows_of_jobs[job.name] for job in jobs if job.name in rows_of_jobs]
    settings = {
        "mean of jobs": [[of.settings, job.weight] for of, job in zip(fingerprints, jobs, strict=True)],
        # Then it is a mean of other jobs than of all.
        "when": any(job.may_lack_rows for job in jobs),
        "rows": np.packbits(rows, axis=1).tobytes().hex() if rows else None,
    }
    return Fingerprint(
        settings=digest_of(settings),
        content=_joined([of_job.content for of_job in fingerprints]),
        rows=digest_of([of_job.rows for of_job in fingerprints]),
    )


def _joined(contents: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the content of several jobs together."""
    words = dict.fromkeys(word for content in contents for word in content)
    return {word: digest_of([content.get(word) for content in contents]) for word in words}


def settings_digests(config: RunConfig, model: MemberConfig) -> dict[str, str]:
    """Return a digest of each key that a member's probabilities may depend on; it is the same on every machine."""
    of_run = {"seed": config.seed, "data.id_column": config.data.id_column, "labels": config.labels}
    values = {**member_kind(model).predicted_by(), **of_run}
    return {key: digest_of(value)[:16] for key, value in values.items()}


def changed_members(config: RunConfig, names: Collection[str], run_dir: Path) -> dict[str, list[str]]:
    """Return what has changed of each member since its predictions in a run's directory were made.

    These are keys of the config, and what files hold, such as "weights". Files that are not on this machine are not
    compared, nor are the rows, as the run may be of a sample.
    """
    rundir, files = RunDir(run_dir), FileDigests(config.hash_weights)
    columns = OutputColumns(config.data.id_column, config.labels, config.data.path.parent)
    changed: dict[str, list[str]] = {}
    for model in config.models:
        if model.name not in names:
            continue
        kind, manifest = member_kind(model), read_json(rundir.manifest(model.name))
        digests, now = manifest.get("settings") or {}, settings_digests(config, model)
        keys = [key for key in now if digests and now[key] != digests.get(key)]
        models = compile_models([model], config.labels)
        sources = [source for loaded in models for source in loaded.kind.sources()]
        if model.training is None and all(Path(source).exists() for source in sources):
            # A path does not count, if the files hold the same.
            values = kind.predicted_by()
            keys = [key for key in keys if str(values.get(key)) not in sources]
            contents: dict[int, Mapping[str, str]] = {}
            for loaded in models:
                inspected = loaded.kind.inspect(columns)
                for job in loaded.jobs:
                    contents[job.number] = member_kind(job.settings).content(inspected, files)
            # A model's jobs need not be next to each other among the member's.
            in_order = [contents[number] for number in sorted(contents)]
            content = _joined(in_order) if model.counted_views else in_order[0]
            made_of = Fingerprint.from_dict(manifest.get("fingerprint"))
            if made_of is not None:
                keys += [name for name in content if content[name] != made_of.content.get(name)]
        if keys:
            changed[model.name] = keys
    return changed


def changed_sentence(changed: Mapping[str, Sequence[str]]) -> str:
    """Return what ``changed_members`` returned as the beginning of a sentence."""
    members = " and ".join(f"{name} ({', '.join(keys)})" for name, keys in changed.items())
    return f"the settings of {members} have changed since the predictions there were made"
