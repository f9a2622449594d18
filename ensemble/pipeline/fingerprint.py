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
from ensemble.config import MemberConfig, RunConfig, ViewConfig
from ensemble.data.row_files import FileCells
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.plan import MemberPlan

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


def member_fingerprint(
    prepared: Prepared, member: MemberPlan, files: FileDigests | None = None
) -> Fingerprint:
    """Return the fingerprint of a member's work; the table must still have its columns.

    With ``hash_weights`` every byte of the weights counts; switching it on or off counts as a change.
    """
    inspected = prepared.inspected[member.name]
    files = files or FileDigests(prepared.config.hash_weights)
    content = member_kind(member.model).content(inspected, files)
    columns = prepared.columns[member.name]
    rows = prepared.table.digest(columns, prepared.files.get(member.name))
    return Fingerprint(settings=_settings(prepared, member, None), content=content, rows=rows)


def view_fingerprints(prepared: Prepared, member: MemberPlan, files: FileDigests) -> list[Fingerprint]:
    """Return the fingerprint of a member's work in each of its views.

    That of a view that changes nothing equals that of the member without views.
    """
    fingerprints = []
    for number, view in enumerate(member.model.counted_views):
        columns = prepared.view_columns[member.name][number]
        rows = prepared.table.digest(columns, file_cells(prepared, member.name, view))
        # With the view's own adapter and checkpoint; the member's fingerprint has those of all views.
        kind = member_kind(member.model.as_view(view))
        inspected = prepared.inspected[member.name].of_checkpoint(member.checkpoint_of(number))
        content = kind.content(inspected, files)
        settings = _settings(prepared, member, number)
        fingerprints.append(Fingerprint(settings=settings, content=content, rows=rows))
    return fingerprints


def file_cells(prepared: Prepared, member: str, view: ViewConfig) -> FileCells | None:
    """Return the cells that name a member's files in one of its views; None if it reads no files."""
    cells = prepared.files.get(member)
    return cells and replace(cells, column=view.columns.get(cells.column, cells.column))


def mean_fingerprint(
    member: MemberPlan,
    whole: Fingerprint,
    views: Sequence[Fingerprint],
    rows_of_views: npt.NDArray[np.bool_] | None = None,
) -> Fingerprint:
    """Return the fingerprint of the mean over a member's views, from that without views and theirs.

    ``rows_of_views`` has for each view the rows that it may compute, bool [views, rows]; None: all.
    """
    weights = [view.weight for view in member.model.counted_views]
    parts = [[view.settings, view.rows, weight] for view, weight in zip(views, weights, strict=True)]
    rows = None if rows_of_views is None else np.packbits(rows_of_views, axis=1).tobytes().hex()
    settings = {
        "mean of views": parts,
        # Then it is a mean of other views than that of all of them.
        "when": bool(member.model.views_with_when),
        "rows": rows,
    }
    return replace(whole, settings=digest_of(settings))


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
        sources = kind.sources()
        if all(Path(source).exists() for source in sources):
            # A path does not count, if the files hold the same.
            values = kind.predicted_by()
            keys = [key for key in keys if str(values.get(key)) not in sources]
            content = kind.content(kind.inspect(columns), files)
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


def _settings(prepared: Prepared, member: MemberPlan, number: int | None) -> str:
    """Return a digest of the settings of a view, by its number, or of the whole member (None)."""
    config, inspected, model = prepared.config, prepared.inspected[member.name], member.model
    assigned: Assigned = member.placement
    swap = None
    if number is not None:
        view, checkpoint = model.counted_views[number], member.checkpoint_of(number)
        model, swap = model.as_view(view), view.swap
        inspected, assigned = inspected.of_checkpoint(checkpoint), assigned.of_checkpoint(checkpoint)
    settings = {
        **member_kind(model).fingerprint(inspected, assigned),
        "task_type": model.task_type,
        "seed": config.seed,
        "csv": [config.data.id_column, *config.labels],
        "swap": swap and [sorted(swap.columns), sorted(swap.labels or ())],
    }
    return digest_of(settings)
