"""What stands on disk of a member's work: shards, rows that could not be computed, complete predictions.

A run asks here what is left to do.  Nothing is believed that cannot be proved: a shard must hold what its name
says, predictions what their manifest says, and both must carry the fingerprint of the work that is asked for now.
Whatever writes here raises ``WriteError`` where the disk is full or the like.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.digests import FileDigest, FileDigests
from ensemble.common.errors import CheckpointError, ConfigError, DataError, MergeError
from ensemble.common.files import changed_files, changed_text, read_json, write_text
from ensemble.common.shards import (
    bad_rows_in,
    bad_rows_path,
    gather_shards,
    read_shard,
    rows_path,
    rows_with_reasons,
    shard_table,
    shards_in,
)
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig
from ensemble.data.digests import RowDigests
from ensemble.data.ids import match_ids
from ensemble.data.predictions_csv import is_as_written, read_predictions
from ensemble.data.row_files import FileCells
from ensemble.members.registry import member_kind
from ensemble.pipeline.fingerprint import (
    Fingerprint,
    file_cells,
    mean_fingerprint,
    member_fingerprint,
    settings_digests,
    view_fingerprints,
)
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.reuse import EarlierWork, write_row_file, write_shards
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Computation, RunReport, WorkerReport, makers_from


@dataclass
class MemberWork:
    """A member's work, as far as it is done.

    Attributes:
        is_done: bool [rows], the rows whose probabilities stand in shards or in the complete predictions.
        bad_rows: table row to reason, of rows that could not be computed.
        is_complete: the predictions and their manifest are there, and are what this run would write.
        is_new: this run made them, without any worker.
        workers: what the workers of the run did that made the predictions.
        computed: what this run computed rows with, once the predictions are written.
        computed_before: what earlier runs computed rows with, the oldest first.
        worked: what they did of the member's work, in bytes of text.
        why_again: why predictions that are there do not count, in words; empty without any.
        files: what the files that it is made of held when the run began, by absolute path.
        row_digests: of the table's rows, [rows, 2]; None where nothing is left to do, or nobody asked.
        taken: how many rows are of other work, and whose: places within the run directory.
        views: the work in each view of a member that has several; its own predictions are their weighted mean, and
            its own ``shards_dir`` is where their folders are.
        weights: of the views.
        columns: of the table, that it reads.
        settings: see ``settings_digests``.
        files_in: the one of them whose cells name files; None: it reads none.
    """

    member: str
    fingerprint: Fingerprint
    shards_dir: Path
    is_done: npt.NDArray[np.bool_]
    bad_rows: dict[int, str] = field(default_factory=dict)
    is_complete: bool = False
    is_new: bool = False
    workers: tuple[WorkerReport, ...] = ()
    computed: Computation | None = None
    computed_before: tuple[Computation, ...] = ()
    worked: float = 0.0
    why_again: str = ""
    files: dict[str, FileDigest] = field(default_factory=dict)
    row_digests: RowDigests | None = None
    taken: dict[str, int] = field(default_factory=dict)
    views: tuple[MemberWork, ...] = ()
    weights: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    files_in: FileCells | None = None

    @property
    def parts(self) -> tuple[MemberWork, ...]:
        """Its work in each view; itself where it has none."""
        return self.views or (self,)

    @property
    def has_rows(self) -> npt.NDArray[np.bool_]:
        """Rows that need not be computed, numbered through the views, bool [views * rows]."""
        if self.is_complete:
            return np.tile(self.is_done, len(self.parts))
        return np.concatenate([one.is_done for one in self.parts])

    @property
    def noted_bad_rows(self) -> dict[int, str]:
        """Rows that could not be computed, numbered through the views."""
        rows = len(self.is_done)
        return {
            row + view * rows: why for view, one in enumerate(self.parts) for row, why in one.bad_rows.items()
        }

    def of_view(self, numbered: Mapping[int, str], view: int) -> dict[int, str]:
        """Those of rows that are numbered through the views that are of one view, by their numbers in the table."""
        rows = len(self.is_done)
        return {row - view * rows: why for row, why in numbered.items() if row // rows == view}

    def bad_rows_of_views(self, numbered: Mapping[int, str]) -> dict[int, str]:
        """Those of rows that are numbered through the views, by their numbers in the table, with the views."""
        if not self.views:
            return dict(numbered)
        found = dict[int, str]()
        for view, one in enumerate(self.views):
            for row, why in self.of_view(numbered, view).items():
                before = f"{found[row]}; " if row in found else ""
                found[row] = f"{before}view {one.member.rpartition('@')[2]}: {why}"
        return dict(sorted(found.items()))

    def values(self, labels: int) -> npt.NDArray[np.float64]:
        """What its shards hold, [rows, labels]; NaN where none has the row."""
        return gather_shards(shards_in(self.shards_dir, len(self.is_done)), len(self.is_done), labels)

    def make_shards_dir(self) -> None:
        """Make the folder of its shards, with what says which rows they are of; and those of its views."""
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        for one in self.views:
            one.make_shards_dir()
        if self.row_digests is not None:
            write_row_file(rows_path(self.shards_dir), self.fingerprint, self.row_digests)

    def keep_bad_rows(self, noted: Mapping[int, str]) -> None:
        """Count rows as done that could not be computed."""
        bad_rows = {row: reason for row, reason in noted.items() if not self.is_done[row]}
        self.bad_rows |= bad_rows
        self.is_done[list(bad_rows)] = True


def refuse_trial(prepared: Prepared, rundir: RunDir) -> None:
    """A trial on the first rows must not take the place of a real run.

    Raises:
        ConfigError: the directory holds predictions of more rows.
    """
    for member in prepared.plan.members if prepared.config.limit is not None else ():
        rows = read_json(rundir.manifest(member.name)).get("rows")
        if isinstance(rows, int) and rows > prepared.table.rows:
            raise ConfigError(
                f"output_dir: {rundir.root} holds {member.name}'s predictions of {rows:,} rows, which a trial on "
                f"{prepared.table.rows:,} rows would replace; give the trial its own: --set output_dir=trial"
            )


def find_works(prepared: Prepared, rundir: RunDir, say: Callable[[str], None]) -> dict[str, MemberWork]:
    """What is done of every member, by name.

    Args:
        say: takes a sentence for the user about each member of which something is, or was, there.

    Raises:
        CheckpointError: a weight file cannot be read.
        DataError: there is nothing to take over in the run that ``prepared.reuse`` names.
    """
    works = {}
    files = FileDigests(prepared.config.hash_weights, prepared.file_states)
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    rows = prepared.table.rows
    for member in prepared.plan.members:
        own = files.for_another()
        fingerprint = member_fingerprint(prepared, member, own)
        may_lack = member.model.when is not None or member_kind(member.model).may_lack_rows
        ids = prepared.table.ids if may_lack else None
        if views := member.model.counted_views:
            of_views = view_fingerprints(prepared, member, fingerprint.content)
            fingerprint = mean_fingerprint(member, of_views, fingerprint)
        work = find_work(rundir, member.name, fingerprint, rows, keeps_bad_rows, ids, is_mean=bool(views))
        work.columns, work.files_in = prepared.columns[member.name], prepared.files.get(member.name)
        work.settings = settings_digests(prepared.config, member.model)
        if views:
            work.weights = tuple(view.weight for view in views)
            work.views = tuple(
                find_work(
                    rundir,
                    view_name(member.name, view.name),
                    of_view,
                    rows,
                    keeps_bad_rows,
                    ids,
                    work.shards_dir / f"{view.name}.{of_view.digest[:16]}",
                )
                for view, of_view in zip(views, of_views, strict=True)
            )
            of_views_columns = prepared.view_columns[member.name]
            for one, view, columns in zip(work.views, views, of_views_columns, strict=True):
                one.columns, one.files_in = columns, file_cells(prepared, member.name, view)
        works[member.name] = work
        for one in {id(one): one for one in (work, *work.parts)}.values():
            one.files = own.seen
        for one in work.parts if member.needs_worker and not work.is_complete else ():
            if not one.is_complete:
                one.row_digests = _row_digests(prepared, one)
    for member in prepared.plan.members:  # before any is completed, in the place of what another may need
        whole = works[member.name]
        for work in (whole,) if whole.is_complete else whole.parts:
            name = work.member
            if work.row_digests is not None and not work.is_done.all():
                take_over(rundir, work, len(prepared.config.labels), keeps_bad_rows, prepared.reuse)
            done = int(work.is_done.sum())
            own_rows = 0 if work.is_complete else done - sum(work.taken.values())
            if work.is_complete:
                say(f"{name}: done by an earlier run, reused")
            elif work.why_again and not own_rows:
                again = "it runs again" if member.needs_worker else "it is read again"
                say(f"{name}: {work.why_again}; {'rows that are as they were are kept' if done else again}")
            if own_rows:
                say(f"{name}: {own_rows:,} of {plural(rows, 'row')} kept from an earlier run")
            for place, count in work.taken.items():
                shown = shown_path(Path(place)) if place.startswith("/") else place
                say(f"{name}: {count:,} of {plural(rows, 'row')} taken over from {shown}")
    if prepared.reuse is not None:
        computed = [works[member.name] for member in prepared.plan.members if member.needs_worker]
        if computed and not any(work.has_rows.any() for work in computed):
            raise DataError(
                f"--reuse: {shown_path(prepared.reuse)} has no row of this table by members with these settings; "
                "name another run, or leave the option out to compute all rows"
            )
        for member in prepared.plan.members:
            work = works[member.name]
            left = int((~work.is_done).sum())
            if work.row_digests is not None and left:
                at_most = "" if member.model.when is None else "at most "
                say(f"{member.name}: {at_most}{plural(left, 'row')} left to compute")
    _add_from_report(rundir, works.values())
    return works


def _add_from_report(rundir: RunDir, works: Iterable[MemberWork]) -> None:
    """Add what manifests lack and the report of the run before has.

    Of workers that is what they told after their member's last row, such as peaks; of rows in shards, what computed
    them.
    """
    lacking = [
        work
        for work in works
        if any(one.life_seconds is None for one in work.workers)
        or (not work.is_complete and work.has_rows.any())
    ]
    if not lacking:
        return
    with suppress(DataError):  # there is none, or one of another version
        report = RunReport.read(rundir.run_json)
        ended = {(one.name, worker.key): worker for one in report.members for worker in one.workers}
        members = {one.fingerprint: one for one in report.members}
        for work in lacking:
            work.workers = tuple(ended.get((work.member, one.key), one) for one in work.workers)
            if work.is_complete:
                continue
            if (before := members.get(work.fingerprint.digest)) is not None:
                work.computed_before = (*before.computations, *work.computed_before)
            else:  # some of its views may be complete
                views = [run for view in work.views for run in view.computed_before]
                work.computed_before = (*work.computed_before, *views)


def view_name(member: str, view: str) -> str:
    """What the work in a member's view is called; no member can have that name."""
    return f"{member}@{view}"


def find_work(
    rundir: RunDir,
    member: str,
    fingerprint: Fingerprint,
    rows: int,
    keeps_bad_rows: bool,
    ids: pa.ChunkedArray | None = None,
    folder: Path | None = None,
    is_mean: bool = False,
) -> MemberWork:
    """What is done of a member under its own name; shards that are not what their names say are removed.

    Args:
        rows: of the table.
        keeps_bad_rows: rows that could not be computed count as done (``on_bad_row: uniform``); else they are
            tried again.
        ids: of the rows, for a member that may have predictions of some of them alone; None: it needs all.
        folder: of its shards; None: the member's own.
        is_mean: it has predictions, and no shards of its own.
    """
    folder = folder or rundir.shards_dir(member, fingerprint.digest)
    predictions = rundir.predictions(member)
    work = MemberWork(member, fingerprint, folder, np.zeros(rows, dtype=np.bool_))
    manifest = read_json(rundir.manifest(member))
    made_of = Fingerprint.from_dict(manifest.get("fingerprint"))
    if made_of is None:
        if isinstance(manifest.get("fingerprint"), dict):
            work.why_again = "its predictions are of another version of this program"
    elif changed := fingerprint.changed_from(made_of):
        work.why_again = f"{', '.join(changed)} changed since its predictions were made"
        before = manifest.get("rows")
        if (
            changed == ("rows",) and isinstance(before, int) and before != rows
        ):  # a trial's, or it grew or shrank
            work.why_again = (
                f"its predictions are of a table of {plural(before, 'row')}, this one has {rows:,}"
            )
    else:
        bad_rows = rows_with_reasons(manifest.get("bad_rows"), rows)
        is_whole, is_of_all = is_as_written(predictions), manifest.get("present") is None
        if is_whole and (keeps_bad_rows or not bad_rows) and (is_of_all or ids is not None):
            if is_of_all or ids is None:
                work.is_done[:] = True
            else:
                file = read_predictions(predictions)
                numbers = match_ids(predictions, file.ids, ids, may_lack=True)
                work.is_done[numbers] = True
                bad_rows = {int(numbers[place]): reason for place, reason in bad_rows.items()}
            work.is_complete, work.bad_rows = True, bad_rows
            worked = manifest.get("work")
            makers = makers_from(manifest)
            work.workers, work.computed_before = makers.workers, makers.computed
            work.worked = worked if isinstance(worked, float) and math.isfinite(worked) else 0.0
            return work
        work.why_again = "" if is_whole else f"{predictions} has been changed"
    if is_mean:
        return work
    for path in sorted(folder.glob("*.csv")):
        table = shard_table(read_shard(path), rows)
        if table is not None:
            work.is_done[table.column("row").to_numpy()] = True
        elif path.is_file():
            path.unlink()
    if keeps_bad_rows:
        work.keep_bad_rows(bad_rows_in(folder, rows))
    return work


def values_of(rundir: RunDir, work: MemberWork, labels: int) -> npt.NDArray[np.float64]:
    """What is known of the rows of a work without views, [rows, labels]; NaN where nothing is."""
    if not work.is_complete:
        return work.values(labels)
    values = np.full((len(work.is_done), labels), np.nan, order="F")
    values[work.is_done] = read_predictions(rundir.predictions(work.member)).values
    return values


def mean_of_views(
    values: Sequence[npt.NDArray[np.float64]], weights: Sequence[float]
) -> npt.NDArray[np.float64]:
    """The weighted mean of a member's views, [rows, labels]: of those that have the row; NaN where none has it.

    Args:
        values: of each view, [rows, labels]; NaN where it has not been computed.
        weights: above 0.
    """
    if len(values) == 1:
        return values[0]
    sums, shares = np.zeros(values[0].shape, order="F"), np.zeros(len(values[0]))
    for one, weight in zip(values, weights, strict=True):
        is_there = ~np.isnan(one[:, 0])
        sums[is_there] += weight * one[is_there]
        shares[is_there] += weight
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / shares[:, None])


def _row_digests(prepared: Prepared, work: MemberWork) -> RowDigests:
    return prepared.table.row_digests(work.columns, work.files_in)


def reopen(prepared: Prepared, rundir: RunDir, work: MemberWork) -> None:
    """Go on with a member whose predictions are not of all rows that it is to have now: they become shards.

    So do those of its views, of which some can be complete where it is not.
    """
    if work.views:
        work.is_complete = False
        for one in work.views:
            reopen(prepared, rundir, one)
    if not work.is_complete:
        return
    work.row_digests = _row_digests(prepared, work)
    rows = np.flatnonzero(work.is_done)
    values = read_predictions(rundir.predictions(work.member)).values
    is_good = ~np.isin(rows, list(work.bad_rows))
    work.is_complete = False
    work.make_shards_dir()
    write_shards(work.shards_dir, rows[is_good], values[is_good])
    if work.bad_rows:
        write_bad_rows(work, work.bad_rows)
    for shard in shards_in(work.shards_dir, len(work.is_done)):  # of a run that had gone on as well
        work.is_done[shard.column("row").to_numpy()] = True


def take_over(
    rundir: RunDir, work: MemberWork, labels: int, keeps_bad_rows: bool, reuse: Path | None = None
) -> None:
    """Take over rows that other work has computed: of another table, under another name, or in another run.

    Args:
        labels: how many values a row has.
        keeps_bad_rows: as for ``find_work``.
        reuse: the other run's directory.
    """
    assert work.row_digests is not None
    others = [] if reuse is None else EarlierWork.all_in(RunDir(reuse.resolve()))
    of_others = (replace(source, place=str(source.values_path)) for source in others)
    for source in chain(EarlierWork.all_in(rundir), of_others):
        if work.is_done.all() or source.values_path == work.shards_dir:
            continue
        places = source.places_of(work.fingerprint, work.row_digests)
        if places is None or not ((places >= 0) & ~work.is_done).any():
            continue
        if (found := source.values(labels)) is None:
            continue
        values, bad_rows = found
        rows = np.flatnonzero((places >= 0) & ~work.is_done & ~np.isnan(values[places]).any(axis=1))
        if len(rows):
            work.make_shards_dir()
            write_shards(work.shards_dir, rows, values[places[rows]])
            work.is_done[rows] = True
            work.taken[source.place] = len(rows)
            work.computed_before += makers_from(read_json(source.path.with_suffix(".json"))).computed
        if keeps_bad_rows and bad_rows:
            known = len(work.bad_rows)
            bad = np.flatnonzero(np.isin(places, list(bad_rows))).tolist()
            work.keep_bad_rows({row: bad_rows[int(places[row])] for row in bad})
            if len(work.bad_rows) > known:
                work.make_shards_dir()
                write_bad_rows(work, work.bad_rows)


def demand_unchanged(prepared: Prepared, model: MemberConfig, work: MemberWork) -> None:
    """Find a member's files as they were when the run began, before its predictions count as complete.

    Its workers have looked at the files' states; here their content is looked at once more, and whether there
    are others by now.  Where the content differs and the states have not told, nothing proves any of its shards:
    they are removed.

    Raises:
        MergeError: they are not; names them.
    """
    files, is_same = FileDigests(prepared.config.hash_weights), False
    with suppress(CheckpointError):  # one of them is being replaced now
        content = member_kind(model).content(prepared.inspected[model.name], files)
        is_same = content == work.fingerprint.content
    changed = set(changed_files({path: seen.state for path, seen in work.files.items()}))
    if is_same and not changed:
        return
    if not changed:
        shutil.rmtree(work.shards_dir, ignore_errors=True)
        before = {path: seen.digest for path, seen in work.files.items()}
        now = {path: seen.digest for path, seen in files.seen.items()}
        changed = {path for path, _ in before.items() ^ now.items()}
    raise MergeError(changed_text(changed))


def write_bad_rows(work: MemberWork, bad_rows: Mapping[int, str]) -> None:
    """Keep which rows could not be computed, for the next run."""
    write_text(bad_rows_path(work.shards_dir), _json(dict(sorted(bad_rows.items()))))


def write_manifest(
    rundir: RunDir, work: MemberWork, sha256: str, is_there: npt.NDArray[np.bool_] | None = None
) -> None:
    """Say beside a member's predictions what they were made of.

    Rows that could not be computed are named by their places in the predictions.

    Args:
        sha256: of the predictions.
        is_there: the rows that they hold, bool [rows]; None: all.
    """
    is_there = np.ones(len(work.is_done), dtype=np.bool_) if is_there is None else is_there
    is_of_all = bool(is_there.all())
    places = np.cumsum(is_there) - 1
    bad_places = {row: int(places[row]) for row in sorted(work.bad_rows) if is_there[row]}
    document: dict[str, object] = {
        "fingerprint": work.fingerprint.to_dict(),
        "settings": dict(work.settings),
        "sha256": sha256,
        "rows": len(work.is_done),
        "bad_rows": {place: work.bad_rows[row] for row, place in bad_places.items()},
        "workers": [asdict(worker) for worker in work.workers],
        "computed": [asdict(run) for run in (*work.computed_before, work.computed) if run is not None],
        "work": work.worked,
    }
    if not is_of_all:
        document["present"] = int(is_there.sum())
    if work.row_digests is not None:
        write_row_file(
            rundir.rows(work.member),
            work.fingerprint,
            work.row_digests if is_of_all else work.row_digests[is_there],
        )
    elif work.views:  # those of a run without views say nothing of these predictions
        rundir.rows(work.member).unlink(missing_ok=True)
    write_text(rundir.manifest(work.member), _json(document))


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
