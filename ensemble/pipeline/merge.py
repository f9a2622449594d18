"""The merge of a run: members' rows in, ensemble and submission out, block by block.

Owns where each member's rows come from, which rows are filled in and how, and which files the merged rows go to.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.files import atomic_path
from ensemble.common.text import plural
from ensemble.data.cells import malloc_for_arrow
from ensemble.data.csv_file import csv_cells, csv_lines, header_line
from ensemble.data.disk_rows import SpilledRows
from ensemble.data.predictions_csv import PredictionsReader, WantedRows
from ensemble.merging.blocks import MergedMember, RowSource, block_spans, merge_blocks
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.metrics import Score, Scoring
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.validate import Prepared
from ensemble.scheduling.state import MemberState

# The ensemble's name among the scores.
ENSEMBLE_ROW: Final = "ensemble"
# More than the members: their text is made meanwhile.
_MAX_THREADS = 16
_Values = npt.NDArray[np.float64]
_Blocks: TypeAlias = Iterator[tuple[int, _Values]]


@dataclass
class Results:
    """Scores by the member's name (and the ensemble's), and files by what they are, in the order they were made.

    ``merged_rows`` counts the rows that each merged member gave, ``filled_rows`` those that none did.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    merged_rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0


class Merge:
    """Merges members of one run once.

    Args:
        works: by member name.
        results: takes what comes of it.
    """

    def __init__(
        self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork], results: Results
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._table = prepared.table
        self._rundir = rundir
        self._works = works
        self._results = results
        self._labels = prepared.config.labels
        self._members: list[MergedMember] = []

    def write(self, members: Sequence[MemberState]) -> None:
        """Merge the members' values, score them where the truth is known, write ensemble and submission.

        Args:
            members: none, or all without a weight, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together, or rows are missing.
            WriteError: the disk is full or the like.
        """
        if not any(state.plan.model.weight for state in members):
            members = ()
        is_whole = bool(members) and all(self._works[state.plan.name].is_complete for state in members)
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        with (
            malloc_for_arrow(),
            ExitStack() as opened,  # closed when the pool's threads are done with them
            ThreadPoolExecutor(threads, "merge") as pool,
        ):
            blocks = self._merged_blocks(members, opened, pool) if members else self._empty_blocks()
            if self._config.time_limit is not None:
                blocks = self._filled(blocks, is_whole)
            self._write_blocks(blocks, pool, threads, self._scoring() if members else None)

    def _scoring(self) -> Scoring | None:
        return None if (truth := self._prepared.truth) is None else Scoring(truth)

    def _empty_blocks(self) -> _Blocks:
        for start, stop in block_spans(self._table.rows, len(self._labels)):
            yield start, np.full((stop - start, len(self._labels)), np.nan, order="F")

    def _merged_blocks(
        self, members: Sequence[MemberState], opened: ExitStack, pool: ThreadPoolExecutor
    ) -> _Blocks:
        table, folder, config = self._table, self._rundir.work_dir, self._config
        wanted = WantedRows(table.ids)
        names = tuple(state.plan.name for state in members)
        complete = [name for name in names if self._works[name].is_complete]
        sources: list[RowSource] = []
        for state, name in zip(members, names, strict=True):
            if name in complete:
                path, id_column = self._rundir.predictions(name), config.data.id_column
                sources.append(
                    PredictionsReader(path, id_column, self._labels, wanted, folder, len(complete))
                )
            else:
                sources.append(SpilledRows(self._unfinished(state), folder))
            opened.callback(sources[-1].close)
        activations = tuple(self._prepared.inspected[name].activation for name in names)

        def open_members() -> list[MergedMember]:
            self._members = []
            for state, source, activation in zip(members, sources, activations, strict=True):
                source.rewind()
                name, is_complete = state.plan.name, state.plan.name in complete
                place = self._rundir.predictions(name) if is_complete else self._works[name].shards_dir
                check = RowCheck(str(place), activation, table.ids, may_lack_rows=not is_complete)
                weight = state.plan.model.weight
                self._members.append(MergedMember(name, weight, source, check, self._scoring()))
            return self._members

        method = merge_method(config.ensemble, Members(names, activations, self._labels))
        yield from merge_blocks(method, open_members, table.ids, table.text_bytes, pool)

    def _unfinished(self, state: MemberState) -> _Values:
        values = self._works[state.plan.name].values(len(self._labels))
        if self._config.on_bad_row == "uniform":
            values[list(state.bad_rows)] = self._prepared.even_value(state.plan.name)
        return values

    def _filled(self, blocks: _Blocks, is_whole: bool) -> _Blocks:
        """The blocks with something in each row, where the config says what."""
        rule, results, sample_values = self._config.fill, self._results, None
        even = self._prepared.even_value(self._config.models[0].name)
        if rule == "prior" and not is_whole:  # the mean of all rows must be known first
            whole = np.empty((self._table.rows, len(self._labels)), order="F")
            for start, values in blocks:
                whole[start : start + len(values)] = values
            results.filled_rows = fill_rows(whole, rule, None, even)
            for start, stop in block_spans(*whole.shape):
                yield start, whole[start:stop]
            return
        for start, values in blocks:
            if np.isnan(values[:, 0]).any():
                if rule == "sample" and sample_values is None:
                    assert self._prepared.sample is not None
                    sample_values = self._prepared.sample.values(self._table.ids)
                own = None if sample_values is None else sample_values[start : start + len(values)]
                results.filled_rows += fill_rows(values, rule, own, even)
            yield start, values

    def _write_blocks(
        self, blocks: _Blocks, pool: ThreadPoolExecutor, threads: int, scoring: Scoring | None
    ) -> None:
        """Write the files whose rows stand in the table's order, then the submission where its rows do not."""
        config, rundir, table, results = self._config, self._rundir, self._table, self._results
        asked, sample = config.submission, self._prepared.sample
        # A path and its columns: names, and labels by number, None for the ids.
        targets: list[tuple[Path, Sequence[str], Sequence[int | None]]] = [
            (rundir.ensemble, (config.data.id_column, *self._labels), (None, *range(len(self._labels))))
        ]
        whole: _Values | None = None
        if sample is not None and sample.is_in_order(table.ids):
            targets.append((rundir.submission, sample.columns, sample.label_numbers))
        elif sample is not None:
            whole = np.empty((table.rows, len(self._labels)), order="F")
        texts: deque[Future[list[pa.Buffer]]] = deque()
        missing = 0
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
                missing += int(np.isnan(values[:, 0]).sum())
                if whole is not None:
                    whole[start : start + len(values)] = values
                if scoring is not None:
                    scoring.add(start, values)
                texts.append(pool.submit(text_of, start, values))
                if len(texts) > threads:
                    write_text(texts.popleft())
            for text in texts:
                write_text(text)
            if missing:
                raise MergeError(
                    f"no member has probabilities for {plural(missing, 'row')}; run the same command again"
                )
        results.files["ensemble"] = rundir.ensemble
        for member in self._members:
            results.merged_rows[member.name] = member.check.reached
            if member.scoring is not None and member.check.reached == table.rows:
                results.scores[member.name] = member.scoring.score()
        if scoring is not None:
            # What fills rows that no member reached says nothing of the members.
            changes = {"no_better_than_prior": False} if results.filled_rows else {}
            results.scores[ENSEMBLE_ROW] = replace(scoring.score(), **changes)
        if sample is None or asked is None:
            return
        written = rundir.submission
        if whole is not None:
            with atomic_path(written) as temporary:
                sample.write(temporary, table.ids, whole, config.limit is not None)
        # A trial on the first rows must not take the place of a real submission.
        if asked.path is not None and config.limit is None:
            asked.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(asked.path) as temporary:
                shutil.copyfile(written, temporary)
            written = asked.path
        results.files["submission"] = written


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
