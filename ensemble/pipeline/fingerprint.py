"""The identity of a member's work: what its probabilities depend on, as digests.

An earlier run's work is this run's where the fingerprints agree.  Only digests leave this module: settings may hold
secrets from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.files import read_json
from ensemble.config import MemberConfig, RunConfig, ViewConfig
from ensemble.data.row_files import FileCells
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from ensemble.planning.plan import MemberPlan

# To be raised where the same digests come to mean something else; older work then counts as another's.
SCHEME = 3


@dataclass(frozen=True)
class Fingerprint:
    """What a member's probabilities depend on; each component is a digest in hexadecimal.

    ``settings`` are the kind, the keys that change numbers and the columns of the member's CSV, ``content`` the
    files that it is made of, by what they are, such as "weights" and "tokenizer", ``rows`` the ids and the columns
    that the member reads, and the files that these name.  Devices, replicas, chunks, batches and the member's name
    are in none of them.
    """

    settings: str
    content: Mapping[str, str] = field(hash=False)
    rows: str

    @property
    def digest(self) -> str:
        """All components in one."""
        return digest_of(self.to_dict())

    def changed_from(self, other: Fingerprint) -> tuple[str, ...]:
        """What differs, in words that can follow "its": settings, weights, tokenizer, rows."""
        mine, theirs = self.to_dict(), other.to_dict()
        return tuple(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))

    def to_dict(self) -> dict[str, str | int]:
        """As JSON can hold it, for ``from_dict``."""
        return {"scheme": SCHEME, "settings": self.settings, **self.content, "rows": self.rows}

    @classmethod
    def from_dict(cls, document: object) -> Fingerprint | None:
        """What ``to_dict`` gave; None for anything else, and for a fingerprint of another scheme."""
        if not isinstance(document, dict) or document.get("scheme") != SCHEME:
            return None
        content = {name: digest for name, digest in document.items() if name != "scheme"}
        if not all(re.fullmatch("[0-9a-f]{64}", str(one)) for one in content.values()):
            return None
        settings, rows = content.pop("settings", None), content.pop("rows", None)
        return None if settings is None or rows is None else cls(settings, content, rows)


def member_fingerprint(
    prepared: Prepared, member: MemberPlan, files: FileDigests | None = None
) -> Fingerprint:
    """The fingerprint of a member's work, before the table forgets its columns.

    With ``hash_weights`` every byte of the weights counts, so that switching it on or off counts as a change, too.

    Args:
        files: what is known of files already; one for all members of a run, where they share weights.

    Raises:
        CheckpointError: a file that the member is made of cannot be read.
    """
    inspected = prepared.inspected[member.name]
    files = files or FileDigests(prepared.config.hash_weights)
    content = member_kind(member.model).content(inspected, files)
    columns = prepared.columns[member.name]
    rows = prepared.table.digest(columns, prepared.files.get(member.name))
    return Fingerprint(_settings(prepared, member, None), content, rows)


def view_fingerprints(
    prepared: Prepared, member: MemberPlan, content: Mapping[str, str]
) -> list[Fingerprint]:
    """Those of a member's work in each of its views: of a view that changes nothing, that of one without views.

    Args:
        content: of the member's own fingerprint.
    """
    views = zip(member.model.counted_views, prepared.view_columns[member.name], strict=True)
    return [
        Fingerprint(
            _settings(prepared, member, view),
            content,
            prepared.table.digest(columns, file_cells(prepared, member.name, view)),
        )
        for view, columns in views
    ]


def file_cells(prepared: Prepared, member: str, view: ViewConfig) -> FileCells | None:
    """The cells that name a member's files in one of its views; None where it reads no files."""
    cells = prepared.files.get(member)
    return cells and replace(cells, column=view.columns.get(cells.column, cells.column))


def mean_fingerprint(member: MemberPlan, views: Sequence[Fingerprint], own: Fingerprint) -> Fingerprint:
    """That of the mean over a member's views.

    Args:
        own: the member's, as if it had none.
    """
    weights = [view.weight for view in member.model.counted_views]
    parts = [[one.settings, one.rows, weight] for one, weight in zip(views, weights, strict=True)]
    return Fingerprint(digest_of({"mean of views": parts}), own.content, own.rows)


def settings_digests(config: RunConfig, model: MemberConfig) -> dict[str, str]:
    """A digest of each key that a member's probabilities may depend on, by its name: the same on every machine."""
    of_run = {"seed": config.seed, "data.id_column": config.data.id_column, "labels": config.labels}
    values = {**member_kind(model).predicted_by(), **of_run}
    return {key: digest_of(value)[:16] for key, value in values.items()}


def changed_members(config: RunConfig, names: Collection[str], run_dir: Path) -> dict[str, list[str]]:
    """Of these members, by name, what has changed since their predictions in a run's directory were made.

    That are keys of the config, and what their files hold, such as "weights".  Files that are not on this machine
    are not compared, nor are the rows: the run may be of a sample.

    Raises:
        EnsembleError: run.json or a member's file cannot be read.
    """
    rundir, files = RunDir(run_dir), FileDigests(config.hash_weights)
    before = {one.name: one.settings for one in RunReport.read(rundir.run_json).members}
    columns = OutputColumns(config.data.id_column, config.labels, config.data.path.parent)
    changed = dict[str, list[str]]()
    for model in (one for one in config.models if one.name in names):
        kind, manifest = member_kind(model), read_json(rundir.manifest(model.name))
        # A run that was interrupted has its own settings in run.json, beside an earlier run's predictions.
        digests = manifest.get("settings") or before.get(model.name, {})
        now = settings_digests(config, model)
        keys = [key for key in now if digests and now[key] != digests.get(key)]
        sources = kind.sources()
        if all(Path(source).exists() for source in sources):
            made_of = Fingerprint.from_dict(manifest.get("fingerprint"))
            content = kind.content(kind.inspect(columns), files)
            values = kind.predicted_by()
            # Another path of files that hold the same changes nothing.
            keys = [key for key in keys if str(values.get(key)) not in sources]
            if made_of is not None:
                keys += [what for what in content if content[what] != made_of.content.get(what)]
        if keys:
            changed[model.name] = keys
    return changed


def changed_sentence(changed: Mapping[str, Sequence[str]]) -> str:
    """What ``changed_members`` found, as the beginning of a sentence."""
    members = " and ".join(f"{name} ({', '.join(keys)})" for name, keys in changed.items())
    return f"the settings of {members} have changed since the predictions there were made"


def _settings(prepared: Prepared, member: MemberPlan, view: ViewConfig | None) -> str:
    config, inspected, model = prepared.config, prepared.inspected[member.name], member.model
    swap = None
    if view is not None:
        model, swap = model.as_view(view), view.swap
    settings = {
        **member_kind(model).fingerprint(inspected, member.placement),
        "task_type": model.task_type,
        "seed": config.seed,
        "csv": [config.data.id_column, *config.labels],
        **({} if swap is None else {"swap": [sorted(swap.columns), sorted(swap.labels or ())]}),
    }
    return digest_of(settings)
