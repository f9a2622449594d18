"""What a run hands over: a CSV per member as soon as it is done, then the merge, the scores and the submission.

The merge goes block by block.  Owned here: where each member's rows come from, which rows are filled in and how,
and which files the merged rows go to.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MergeError
from ensemble.common.files import atomic_path
from ensemble.common.shards import file_sha256
from ensemble.common.text import plural
from ensemble.data.csv_file import csv_cells, csv_lines, header_line, write_csv
from ensemble.data.digests import truth_sha256
from ensemble.data.predictions_csv import read_predictions
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.merging.blocks import MergedMember, Without, block_spans, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.row_checks import RowCheck
from ensemble.merging.scoring import CascadeComparison, CascadeScoring, Gain, Resamples, Score, Scoring
from ensemble.pipeline.prepare import given_predictions
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import (
    MemberWork,
    demand_unchanged,
    mean_of_views,
    values_of,
    write_manifest,
)
from ensemble.pipeline.reuse import note_merged_rows, note_rule_rows
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Computation, FittedOn, WorkerReport
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.state import MemberState

# The ensemble's name among the scores.
ENSEMBLE_ROW: Final = "ensemble"
# More than the members: their text is made meanwhile.
_MAX_THREADS = 16
_Values = npt.NDArray[np.float64]
_Blocks: TypeAlias = Iterator[tuple[int, _Values]]


def predictions_title(member: str) -> str:
    """What a member's predictions are called among a run's results."""
    return f"predictions of {member}"


@dataclass
class Results:
    """Scores by the member's name (and the ensemble's), and files by what they are, in the order they were made.

    ``gain`` is the ensemble's over its best member, None where no member has all rows or there is one alone.
    ``merged_rows`` counts the rows that each merged member gave, ``filled_rows`` those that none did.
    ``comparisons`` are of members with ``when``: the ensemble with them and without them.  ``view_rows`` has, of
    members that were merged before they were complete, how many rows each view has, ``partial_rows`` how many lack
    some of their views: they are the mean of the others.  ``fitted_on``: see ``RunReport``.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    gain: Gain | None = None
    files: dict[str, Path] = field(default_factory=dict)
    merged_rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0
    comparisons: dict[str, CascadeComparison] = field(default_factory=dict)
    view_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    partial_rows: dict[str, int] = field(default_factory=dict)
    fitted_on: FittedOn | None = None


class ResultWriter:
    """Writes a run's results; raises ``WriteError`` where the disk is full or the like.

    Args:
        works: by member name.
        results: takes what comes of it.
    """

    def __init__(
        self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork], results: Results
    ) -> None:
        # Returns the rows that a member is to have; None: all.
        self.rows_of: Callable[[str], npt.NDArray[np.bool_] | None] = lambda name: None
        self._prepared = prepared
        self._config = prepared.config
        self._rundir = rundir
        self._works = works
        self._labels = prepared.config.labels
        self.results = results

    def write_predictions(
        self, state: MemberState, workers: Sequence[WorkerReport], computed: Computation | None = None
    ) -> None:
        """Gather a finished member's shards into its CSV, and complete it with its manifest.

        Rows that could not be computed get equal probabilities.

        Args:
            workers: what its workers did, for the manifest.
            computed: what they computed with, for the manifest; None where they computed no row.

        Raises:
            MergeError: a row is missing, or the checkpoint's files changed since the run began.
        """
        name, whole = state.plan.name, self._works[state.plan.name]
        wanted = self.rows_of(name)
        if not whole.is_complete:
            demand_unchanged(self._prepared, state.plan.model, whole)
        for view, work in enumerate(() if whole.is_complete else whole.parts):
            if work.is_complete:
                continue
            values, bad_rows = work.values(len(self._labels)), whole.rows_of_view(state.bad_rows, view)
            is_missing = np.isnan(values).any(axis=1)
            missing = np.setdiff1d(
                np.flatnonzero(is_missing if wanted is None else is_missing & wanted), list(bad_rows)
            )
            if len(missing):
                shown = ", ".join(f"row {row + 1}" for row in missing[:3])
                raise MergeError(
                    f"{plural(len(missing), 'row')} missing in its shards in {work.shards_dir} ({shown}): some "
                    "were removed or changed; run the same command again"
                )
            values[list(bad_rows)] = self._prepared.even_value(name)
            work.bad_rows, work.computed = bad_rows, computed
            if not whole.views:
                work.workers, work.work_bytes = tuple(workers), state.plan.work * state.computed_cost
            self._complete(work, values)
        if not whole.is_complete:
            whole.bad_rows, whole.computed = whole.bad_rows_of_views(state.bad_rows), computed
            whole.workers, whole.work_bytes = tuple(workers), state.plan.work * state.computed_cost
            parts = [values_of(self._rundir, one, len(self._labels)) for one in whole.views]
            mean = mean_of_views(parts, whole.weights)
            # A view can have more rows than its member is to have now, of an earlier run.
            mean[np.isnan(parts).any(axis=(0, 2))] = np.nan
            self._complete(whole, mean)
        self.results.files[predictions_title(name)] = self._rundir.predictions(name)

    def write_given(self, member: MemberPlan) -> None:
        """Write the predictions of a member that needs no worker, with their manifest.

        Raises:
            DataError: they cannot be had, or are no probabilities.
            MergeError: a file that they are made of changed since the run began.
        """
        columns = OutputColumns(self._config.data.id_column, self._labels)
        kind, inspected = member_kind(member.model), self._prepared.inspected[member.name]
        given = given_predictions(kind, inspected, self._prepared.table, columns)
        work = self._works[member.name]
        demand_unchanged(self._prepared, member.model, work)
        self._complete(work, given.values)
        work.is_new = True

    def _complete(self, work: MemberWork, values: _Values) -> None:
        table = self._prepared.table
        is_there, ids = np.asarray(~np.isnan(values).any(axis=1)), table.ids
        if not is_there.all():
            ids, values = ids.filter(pa.array(is_there)), values[is_there]
        with atomic_path(self._rundir.predictions(work.member)) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [ids, *map(pa.array, values.T)])
            sha256 = file_sha256(temporary)
        write_manifest(self._rundir, work, sha256, is_there)
        work.is_done[:] = is_there
        work.is_complete = True

    def merge(self, members: Sequence[MemberState]) -> None:
        """Merge the members' values, score them where the truth is known, write ensemble and submission.

        A row that some of them did not reach is merged from the others; one that none reached is filled in.

        Args:
            members: those to merge, finished or not; none, or none with a weight, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together, or rows are missing.
        """
        if not any(state.plan.model.has_weight for state in members):
            members = ()
        results = self.results
        # Those of a first submission.
        results.scores, results.gain, results.merged_rows, results.filled_rows = {}, None, {}, 0
        results.comparisons, results.view_rows, results.partial_rows = {}, {}, {}
        rules = self._prepared.rules
        note_rule_rows(self._rundir.rule_rows, None if rules is None else rules.rows)
        table, merged = self._prepared.table, list[MergedMember]()
        is_scored = METHODS.load(self._config.ensemble.method).gives_probabilities
        scoring = self._scoring(is_scored) if members else None
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        with ThreadPoolExecutor(threads, "merge") as pool:
            blocks = self._merged_blocks(members, merged)
            if self._config.time_limit is not None:
                blocks = self._filled(blocks)
            if scoring is not None:
                blocks = _scored(blocks, scoring)
            whole = self._write_blocks(blocks, pool, threads)
        for member in merged:
            results.merged_rows[member.name] = member.check.reached
            own = member.scoring if member.check.reached == table.rows else None
            if own is not None and (score := own.score()) is not None:
                results.scores[member.name] = score
        if scoring is not None and (score := scoring.score()) is not None:
            # What fills rows that no member reached says nothing of the members.
            if results.filled_rows:
                score = replace(score, no_better_than_prior=False)
            elif is_scored and len(merged) > 1:
                with_all_rows = [member for member in merged if member.name in results.scores]
                results.gain = _gain_over_best(scoring, with_all_rows)
            results.scores[ENSEMBLE_ROW] = score
        # Without some member the weights are not those that were fitted.
        are_all = len(members) == len(self._config.models)
        results.fitted_on = self._fitted_on if are_all and ENSEMBLE_ROW in results.scores else None
        asked, sample, written = self._config.submission, self._prepared.sample, self._rundir.submission
        if asked is None or sample is None:
            return
        is_trial = self._config.limit is not None
        if whole is not None:
            with atomic_path(written) as temporary:
                sample.write(temporary, table.ids, whole)
        # A trial on the first rows must not take the place of a real submission.
        if asked.path is not None and not is_trial:
            asked.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(asked.path) as temporary:
                shutil.copyfile(written, temporary)
            written = asked.path
        results.files["submission"] = written

    @cached_property
    def _fitted_on(self) -> FittedOn | None:
        """What the weights were fitted on, where that is this table with these labels."""
        fitted, table, truth = self._config.fitted_on, self._prepared.table, self._prepared.truth
        if fitted is None or truth is None or fitted.rows != table.rows:
            return None
        if truth_sha256(table.ids, self._labels, truth) != fitted.sha256.lower():
            return None
        return FittedOn(**fitted.model_dump())

    def _scoring(self, has_loss: bool = True) -> Scoring | None:
        truth = self._prepared.truth
        if truth is None:
            return None
        return Scoring(truth, self._prepared.activation, self._resamples, has_loss)

    @cached_property
    def _resamples(self) -> Resamples:
        return Resamples(self._prepared.table.rows)

    def _merged_blocks(
        self,
        members: Sequence[MemberState],
        merged: list[MergedMember],
    ) -> _Blocks:
        """Yield the blocks; ``merged`` takes the members as they are read."""
        table, config = self._prepared.table, self._config
        if not members:
            for start, stop in block_spans(table.rows, len(self._labels)):
                empty = np.full((stop - start, len(self._labels)), np.nan, order="F")
                self._apply_rules(start, empty)
                yield start, empty
            return
        names = tuple(state.plan.name for state in members)
        values_of_members = [self._values_to_merge(state) for state in members]
        activations = tuple(self._prepared.inspected[name].activation for name in names)
        rules = None if self._prepared.rules is None else self._apply_rules

        def open_members() -> list[MergedMember]:
            merged.clear()
            for state, values, activation in zip(members, values_of_members, activations, strict=True):
                name, is_complete = state.plan.name, self._works[state.plan.name].is_complete
                place = self._rundir.predictions(name) if is_complete else self._works[name].shards_dir
                is_of_all = is_complete and self._works[name].is_done.all() and self.rows_of(name) is None
                check = RowCheck(str(place), activation, table.ids, may_lack_rows=not is_of_all)
                model = state.plan.model
                calibrate = calibrator(model.calibration, activation, self._labels)
                scoring, ruled = self._scoring(), None if rules is None else self._scoring()
                merged.append(
                    MergedMember(name, model.weight, values, check, scoring, calibrate, rules, ruled)
                )
            return merged

        weights = tuple(state.plan.model.weight for state in members)
        merged_by = Members(names, activations, self._labels, weights)
        method = merge_method(config.ensemble, merged_by)
        truth, comparing = self._prepared.truth, dict[int, Without]()
        if truth is not None and method.gives_probabilities:
            limited = [number for number, name in enumerate(names) if self.rows_of(name) is not None]
            comparing = {
                number: Without(
                    merge_method(config.ensemble, merged_by),
                    CascadeScoring(truth, self._prepared.activation, self._resamples),
                )
                for number in limited
            }
        yield from merge_blocks(method, open_members, table.ids, table.text_bytes, comparing, rules)
        for number, one in comparing.items():
            if (found := one.scoring.result()) is not None:
                self.results.comparisons[names[number]] = found

    def _values_to_merge(self, state: MemberState) -> _Values:
        """Return the values of the rows that a member is to have, float64 [rows, labels]; NaN in the others.

        Raises:
            MergeError: its predictions do not fit the table.
        """
        name, work, table = state.plan.name, self._works[state.plan.name], self._prepared.table
        wanted = self.rows_of(name)
        if work.is_complete:
            is_merged = np.ones(int(work.is_done.sum()), np.bool_) if wanted is None else wanted[work.is_done]
            note_merged_rows(self._rundir.merged_rows(name), is_merged)
            may_lack = not work.is_done.all()
            try:
                file = read_predictions(
                    self._rundir.predictions(name), self._config.data.id_column, self._labels, may_lack
                )
                values, _ = file.join(table.ids, may_lack=may_lack)
            except DataError as error:
                raise MergeError(error.problems) from error
        else:
            values = self._unfinished(state)
        if wanted is not None:
            values[~wanted] = np.nan
        return values

    def _unfinished(self, state: MemberState) -> _Values:
        name, work = state.plan.name, self._works[state.plan.name]
        parts = [values_of(self._rundir, one, len(self._labels)) for one in work.parts]
        if self._config.on_bad_row == "uniform":
            for view, values in enumerate(parts):
                values[list(work.rows_of_view(state.bad_rows, view))] = self._prepared.even_value(name)
        if work.views:
            is_there = np.array([~np.isnan(values[:, 0]) for values in parts])
            self.results.view_rows[name] = tuple(is_there.sum(axis=1).tolist())
            self.results.partial_rows[name] = int((is_there.any(axis=0) & ~is_there.all(axis=0)).sum())
        return mean_of_views(parts, work.weights)

    def _apply_rules(self, start: int, values: _Values, only: npt.NDArray[np.bool_] | None = None) -> None:
        """Change a block's rows by the config's rules, in place."""
        if (rules := self._prepared.rules) is not None:
            method = METHODS.load(self._config.ensemble.method)
            rules.apply(start, values, rules.are_exclusive(self._prepared.activation, method), only)

    def _filled(self, blocks: _Blocks) -> _Blocks:
        """The blocks with something in each row, where the config says what."""
        rule, table, sample, sample_values = (
            self._config.fill,
            self._prepared.table,
            self._prepared.sample,
            None,
        )
        even = self._prepared.even_value(self._config.models[0].name)
        if rule == "prior":  # the mean of all rows must be known first
            whole = np.empty((table.rows, len(self._labels)), order="F")
            for start, values in blocks:
                whole[start : start + len(values)] = values
            empty = np.isnan(whole[:, 0])
            self.results.filled_rows = fill_rows(whole, rule, None, even)
            for start, stop in block_spans(*whole.shape):
                self._apply_rules(start, whole[start:stop], empty[start:stop])
                yield start, whole[start:stop]
            return
        for start, values in blocks:
            if (empty := np.isnan(values[:, 0])).any():
                if rule == "sample" and sample is not None and sample_values is None:
                    sample_values = sample.values(table.ids)
                own = None if sample_values is None else sample_values[start : start + len(values)]
                self.results.filled_rows += fill_rows(values, rule, own, even)
                self._apply_rules(start, values, empty)
            yield start, values

    def _write_blocks(self, blocks: _Blocks, pool: ThreadPoolExecutor, threads: int) -> _Values | None:
        """Write the files whose rows stand in the table's order; returns all rows where the submission's do not."""
        rundir, table, sample = self._rundir, self._prepared.table, self._prepared.sample
        # A path and its columns: names, and labels by number, None for the ids.
        targets: list[tuple[Path, Sequence[str], Sequence[int | None]]] = [
            (rundir.ensemble, (self._config.data.id_column, *self._labels), (None, *range(len(self._labels))))
        ]
        whole: _Values | None = None
        if sample is not None and sample.is_in_order(table.ids):
            targets.append((rundir.submission, sample.columns, sample.label_numbers))
        elif sample is not None:
            whole = np.empty((table.rows, len(self._labels)), order="F")
        texts: deque[Future[list[pa.Buffer]]] = deque()
        missing, first_missing = 0, ""
        with ExitStack() as files:
            streams: list[BinaryIO] = []
            for path, header, _ in reversed(targets):  # because the first then gets its name first
                # Under another name, which becomes its own where nothing goes wrong before the end of the "with".
                temporary = files.enter_context(atomic_path(path))
                streams.insert(0, files.enter_context(temporary.open("wb")))
                streams[0].write(header_line(header))

            def write_text(text: Future[list[pa.Buffer]]) -> None:
                for stream, lines in zip(streams, text.result(), strict=True):
                    stream.write(lines)

            def text_of(start: int, values: _Values) -> list[pa.Buffer]:
                """The lines of a block for each target; numbers become text once for all."""
                ids = csv_cells(pa.concat_arrays(table.ids.slice(start, len(values)).chunks))
                cells = [csv_cells(pa.array(column)) for column in values.T]
                return [
                    csv_lines([ids if number is None else cells[number] for number in numbers])
                    for *_, numbers in targets
                ]

            for start, values in blocks:
                if (empty := np.flatnonzero(np.isnan(values[:, 0]))).size:
                    first_missing = first_missing if missing else str(table.ids[start + int(empty[0])])
                    missing += len(empty)
                if whole is not None:
                    whole[start : start + len(values)] = values
                texts.append(pool.submit(text_of, start, values))
                if len(texts) > threads:
                    write_text(texts.popleft())
            for text in texts:
                write_text(text)
            if missing:
                raise MergeError(
                    f"no member with a weight has probabilities for {plural(missing, 'row')}, the first is id "
                    f"{first_missing}; run the same command again, or add a member that has them"
                )
        self.results.files["ensemble"] = rundir.ensemble
        return whole


def _scored(blocks: _Blocks, scoring: Scoring) -> _Blocks:
    for start, values in blocks:
        scoring.add(start, values)
        yield start, values


def _gain_over_best(scoring: Scoring, members: Sequence[MergedMember]) -> Gain | None:
    """Return the gain over the member with the least loss; None if there are no members."""
    by_name = {member.name: member.ruled or member.scoring for member in members}
    alone = {name: single for name, single in by_name.items() if single is not None}
    if not alone:
        return None
    best = min(alone, key=lambda name: alone[name].loss)
    return scoring.gain_over(alone[best], best)


def fill_rows(
    values: _Values,
    rule: Literal["uniform", "prior", "sample"],
    sample_values: _Values | None,
    even: float,
) -> int:
    """Fill the rows that hold NaN, in place; the others stay as they are, bit for bit.

    Args:
        values: float64 [rows, labels].
        rule: ``uniform``: ``even`` in each column; ``prior``: the mean of the other rows, uniform where there are
            none; ``sample``: the row of ``sample_values``.
        sample_values: float64 [rows, labels], all finite; only ``sample`` needs them.

    Returns:
        how many rows were filled.
    """
    empty = np.isnan(values).any(axis=1)
    if rule == "sample":
        assert sample_values is not None
        values[empty] = sample_values[empty]
    elif rule == "prior" and not empty.all():
        # Column by column, where the rows need not be copied.
        values[empty] = [column.mean(where=~empty) for column in values.T]
    else:
        values[empty] = even
    return int(empty.sum())
