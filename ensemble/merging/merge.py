"""The merge of a run: members' rows in, ensemble and submission out, block by block.

Owns where each member's rows come from, which rows are filled in and how, and which files the merged rows go to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.files import atomic_path
from ensemble.common.text import plural
from ensemble.data.csv_file import csv_cells, csv_lines, header_line
from ensemble.data.disk_rows import SpilledRows
from ensemble.data.predictions_csv import PredictionsReader, WantedRows
from ensemble.data.submission import is_in_order, sample_values, submitted_columns, write_submission
from ensemble.merging.blocks import MergedMember, block_spans, mean_blocks
from ensemble.merging.fill import fill_rows
from ensemble.merging.metrics import Score, Scoring
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.validate import Prepared, scores_make_sense

_Values = npt.NDArray[np.float64]
# More than the members: their text is made meanwhile.
_MOST_THREADS = 16


@dataclass(frozen=True)
class MergeInput:
    """One member to merge.

    Attributes:
        predictions: its sealed CSV; None where it has none.
        gathered: what its parts hold instead, NaN where no part has the row; called once.
        place: where its rows come from, for messages.
    """

    name: str
    weight: float
    predictions: Path | None
    gathered: Callable[[], _Values]
    place: Path


@dataclass
class Merged:
    """What a merge gave: scores by member (and the ensemble's), rows per member, rows filled in, files."""

    scores: dict[str, Score] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0
    files: dict[str, Path] = field(default_factory=dict)


class Merge:
    """Merges members of one run once.

    Args:
        even: what stands in a row of which nothing is known.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, even: float) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._table = prepared.table
        self._rundir = rundir
        self._even = even
        self._labels = prepared.config.labels
        self._merged = Merged()
        self._sample_values: _Values | None = None
        has_truth = self._table.truth is not None and scores_make_sense(prepared.inspected)
        self._truth = self._table.truth if has_truth else None

    def write(self, inputs: Sequence[MergeInput]) -> Merged:
        """Average the members' values, score them where the truth is known, write ensemble and submission.

        Args:
            inputs: none, or all without a weight, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together, or rows are missing.
            WriteError: the disk is full or the like.
        """
        if not any(one.weight for one in inputs):
            inputs = ()
        threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        with (
            _frugal_allocator(),
            contextlib.ExitStack() as opened,  # closed when the pool's threads are done with them
            ThreadPoolExecutor(threads, "merge") as pool,
        ):
            members = self._members(inputs, opened)
            blocks = mean_blocks(members, self._table.rows, len(self._labels), pool)
            if self._config.time_limit is not None:
                blocks = self._filled(blocks, any(one.predictions is None for one in inputs) or not inputs)
            self._write_blocks(blocks, pool, threads, members)
        return self._merged

    def _members(self, inputs: Sequence[MergeInput], opened: contextlib.ExitStack) -> list[MergedMember]:
        ids, wanted = self._table.ids, WantedRows(self._table.ids) if inputs else None
        sealed = sum(one.predictions is not None for one in inputs)
        members = []
        for one in inputs:
            source: PredictionsReader | SpilledRows
            if one.predictions is None or wanted is None:
                source = SpilledRows(one.gathered(), self._rundir.work_dir)
            else:
                source = PredictionsReader(
                    one.predictions,
                    self._config.data.id_column,
                    self._labels,
                    wanted,
                    self._rundir.work_dir,
                    sealed,
                )
            opened.callback(source.close)
            activation = self._prepared.inspected[one.name].activation
            check = RowCheck(str(one.place), activation, ids, may_lack_rows=one.predictions is None)
            scoring = Scoring(self._truth) if self._truth is not None else None
            members.append(MergedMember(one.name, one.weight, source, check, scoring))
        return members

    def _filled(
        self, blocks: Iterator[tuple[int, _Values]], may_lack_rows: bool
    ) -> Iterator[tuple[int, _Values]]:
        """The blocks with something in each row, where the config says what."""
        rule = self._config.fill
        if rule == "prior" and may_lack_rows:  # the mean of all rows must be known first
            whole = np.empty((self._table.rows, len(self._labels)), order="F")
            for start, values in blocks:
                whole[start : start + len(values)] = values
            self._merged.filled_rows = fill_rows(whole, rule, None, self._even)
            for start, stop in block_spans(*whole.shape):
                yield start, whole[start:stop]
            return
        for start, values in blocks:
            if np.isnan(values[:, 0]).any():
                given = self._given_values()
                given = None if given is None else given[start : start + len(values)]
                self._merged.filled_rows += fill_rows(values, rule, given, self._even)
            yield start, values

    def _given_values(self) -> _Values | None:
        config, sample = self._config, self._prepared.sample
        if config.fill == "sample" and sample is not None and config.submission is not None:
            if self._sample_values is None:
                self._sample_values = sample_values(
                    sample, config.submission.sample, self._table.ids, self._labels, config.submission.columns
                )
            return self._sample_values
        return None

    def _write_blocks(
        self,
        blocks: Iterator[tuple[int, _Values]],
        pool: ThreadPoolExecutor,
        threads: int,
        members: Sequence[MergedMember],
    ) -> None:
        """Write the files whose rows stand in the table's order, then the submission where its rows do not."""
        scoring = Scoring(self._truth) if self._truth is not None and members else None
        targets = [_Target(self._rundir.ensemble, self._header, (None, *range(len(self._labels))))]
        whole = self._add_submission(targets)
        waiting: deque[Future[list[pa.Buffer]]] = deque()
        missing = 0
        with contextlib.ExitStack() as files:
            # From the last to the first, because the first then gets its name first.
            streams = [target.opened(files) for target in reversed(targets)][::-1]
            for start, values in blocks:
                missing += int(np.isnan(values[:, 0]).sum())
                if whole is not None:
                    whole[start : start + len(values)] = values
                if scoring is not None:
                    scoring.add(start, values)
                waiting.append(pool.submit(self._text, start, values, targets))
                if len(waiting) > threads:
                    _put(waiting.popleft(), streams)
            while waiting:
                _put(waiting.popleft(), streams)
            if missing:
                raise MergeError(
                    f"no member has probabilities for {plural(missing, 'row')}; run the same command again"
                )
        self._note_results(members, scoring)
        self._submit(whole)

    @property
    def _header(self) -> tuple[str, ...]:
        return (self._config.data.id_column, *self._labels)

    def _add_submission(self, targets: list[_Target]) -> _Values | None:
        """The submission as one more target; or room for all rows, where it wants them in another order."""
        config, sample = self._config, self._prepared.sample
        if config.submission is None or sample is None:
            return None
        if not is_in_order(sample, self._table.ids):
            return np.empty((self._table.rows, len(self._labels)), order="F")
        columns = submitted_columns(sample, self._labels, config.submission.columns)
        targets.append(_Target(self._rundir.submission, sample.columns, columns))
        return None

    def _text(self, start: int, values: _Values, targets: Sequence[_Target]) -> list[pa.Buffer]:
        """The lines of a block for each target; numbers become text once for all."""
        ids = csv_cells(pa.concat_arrays(self._table.ids.slice(start, len(values)).chunks))
        numbers = [csv_cells(pa.array(column)) for column in values.T]
        return [
            csv_lines([ids if index is None else numbers[index] for index in target.columns])
            for target in targets
        ]

    def _note_results(self, members: Sequence[MergedMember], scoring: Scoring | None) -> None:
        merged = self._merged
        merged.files["ensemble"] = self._rundir.ensemble
        for member in members:
            merged.rows[member.name] = member.check.reached
            if member.scoring is not None and member.check.reached == self._table.rows:
                merged.scores[member.name] = member.scoring.score()
        if scoring is not None:
            score = scoring.score()
            # What fills rows that no member reached says nothing of the members.
            merged.scores[ENSEMBLE_ROW] = (
                replace(score, no_better_than_prior=False) if merged.filled_rows else score
            )

    def _submit(self, whole: _Values | None) -> None:
        config, sample = self._config, self._prepared.sample
        if config.submission is None or sample is None:
            return
        written = self._rundir.submission
        if whole is not None:
            with atomic_path(written) as temporary:
                write_submission(
                    sample,
                    self._table.ids,
                    whole,
                    self._labels,
                    config.submission.columns,
                    temporary,
                    config.limit is not None,
                )
        # A trial on the first rows must not take the place of a real submission.
        if config.submission.path is not None and config.limit is None:
            config.submission.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(config.submission.path) as temporary:
                shutil.copyfile(written, temporary)
            written = config.submission.path
        self._merged.files["submission"] = written


@dataclass(frozen=True)
class _Target:
    """A CSV of the merged rows; ``columns`` are label numbers, or None for the ids."""

    path: Path
    header: Sequence[str]
    columns: Sequence[int | None]

    def opened(self, files: contextlib.ExitStack) -> BinaryIO:
        """Open it under another name, which becomes its own when ``files`` ends without an error."""
        temporary = files.enter_context(atomic_path(self.path))
        stream = files.enter_context(temporary.open("wb"))
        stream.write(header_line(self.header))
        return stream


@contextlib.contextmanager
def _frugal_allocator() -> Iterator[None]:
    """pyarrow's usual allocator holds on to some 60 MB more while five files are read by turns."""
    before = pa.default_memory_pool()
    with contextlib.suppress(NotImplementedError):  # pyarrow can be built without it
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _put(texts: Future[list[pa.Buffer]], streams: Sequence[BinaryIO]) -> None:
    for text, stream in zip(texts.result(), streams, strict=True):
        stream.write(text)


ENSEMBLE_ROW = "ensemble"
