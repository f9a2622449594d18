"""Define the sections of the report, their data, and the tools that all sections share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import ClassVar, Final

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from ensemble.analysis.predictions import Predictions, calibrations_of, read_run
from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.files import unreadable
from ensemble.common.text import duration, plural, shown_path
from ensemble.data.answers import numbers_of
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.ids import places_among
from ensemble.data.input_file import Wanted, cell_texts
from ensemble.merging.blocks import weights_by_bin
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import MergeMethod, Values
from ensemble.merging.metrics import METRICS, USUAL, Metric, find_metric
from ensemble.merging.post_process import RowRules
from ensemble.merging.scoring import Bootstrap, Interval
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

ENSEMBLE: Final = "ensemble"
NOTHING: Final = "\N{EN DASH}"
METRIC_NAMES: Final = {"log_loss": "log loss", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE"}
# Characters of a text in a table that gets a wide column.
_LONG = 40


class Section(ABC):
    """Make a section of the page; each is a class, and a line in ``SECTIONS`` (page.py)."""

    title: ClassVar[str]  # the heading, also in the list of contents

    @abstractmethod
    def html(self, data: ReportData) -> Markup | None:
        """Return what stands below the heading, or None if there is nothing to show.

        ``render``, ``html``, ``table`` and ``picture`` make it.  If this method raises, the page says so in the
        section's place and keeps the other sections.  A ``DataError`` is no fault: what the section would show is
        not there, as in a run that failed.
        """

    def render(self, **values: object) -> Markup:
        """Call the macro of the class's name in the template beside its file, ``NAME.j2``; see ``rendered``."""
        return rendered(type(self).__module__, type(self).__name__, **values)


@dataclass
class ReportData:
    """Hold the data of a report; what takes long to read is read when a section first asks for it."""

    run_dir: Path
    report: RunReport
    problems: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        names = [member.name for member in self.report.members]
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        members = f"{' + '.join(names[:3])}{more}"
        return f"Run report: {shown_path(self.run_dir)}, {members}, {plural(self.report.rows, 'row')}"

    @cached_property
    def predictions(self) -> Predictions:
        """Return what the members and the ensemble gave, with the true labels if the run had them.

        The members' values are as they were merged, after the calibrations of the config.
        """
        return self.calibrated.as_merged({})

    @cached_property
    def calibrated(self) -> Predictions:
        """Return the same before labels that are impossible in a row became 0, as ``fit`` takes them."""
        return read_run(self.run_dir).as_merged(calibrations_of(self.report), keeps_impossible=True)

    @cached_property
    def as_ruled(self) -> dict[str, Values]:
        """Return what each member alone would give with the run's rules, to compare with the ensemble."""
        predictions = self.predictions
        if predictions.post.rules is None:
            return predictions.members
        ruled = {name: values.copy(order="F") for name, values in predictions.members.items()}
        is_exclusive = RowRules.are_exclusive(predictions.activation, self.method)
        for values in ruled.values():
            predictions.post.merged(0, values, is_exclusive, np.asarray(~np.isnan(values).any(axis=1)))
        return ruled

    @property
    def values_of_all(self) -> dict[str, Values]:
        """Return the values of the members, and of the ensemble if the run has merged, by name."""
        merged = self.predictions.ensemble
        return self.predictions.members | ({} if merged is None else {ENSEMBLE: merged})

    @cached_property
    def method(self) -> type[MergeMethod]:
        """Return the merge method; the base class if its package is no longer installed."""
        try:
            return METHODS.load(str(self.report.ensemble.get("method", "mean")))
        except EnsembleError:
            return MergeMethod

    @cached_property
    def mean_weights(self) -> dict[str, float]:
        """Return the members' weights as the config has them; of weights by label or length their mean."""
        weights = {member.name: member.weight for member in self.report.members}
        names = [*self.predictions.members]
        bins = len(self.report.ensemble.get("length_bins") or ()) + 1
        means = weights_by_bin([weights[name] for name in names], self.predictions.labels, bins).mean(
            axis=(1, 2)
        )
        return dict(zip(names, means.tolist(), strict=True))

    @cached_property
    def metrics(self) -> list[Metric]:
        """Return the metrics that are shown, first the loss that decides, last those that the config names."""
        metrics = {name: METRICS[name] for name in USUAL[self.predictions.activation]}
        numbers = numbers_of(self.predictions.labels)
        for wanted in self.report.metrics:
            try:
                metric = find_metric(wanted.name, numbers, wanted.group)
                metrics.setdefault(metric.name, metric)
            except EnsembleError as error:
                self.problems.update(error.problems)
        return [*metrics.values()]

    def score(self, metric: Metric, values: Values, others: Values | None = None) -> Interval | None:
        """Return a metric over the rows that have values, or how far it is above that of ``others``.

        It is None if it is not defined for these rows; ``problems`` then say why, or of what it is the mean.
        """
        sides = [values] if others is None else [values, others]
        bootstrap, parts = self._bootstrap.of_common_rows(*sides)
        try:
            scores = [bootstrap.score(metric, part) for part in parts]
        except DataError as error:
            self.problems.add(str(error))
            return None
        if scores[0].partition is not None:
            self.problems.add(f"{metric.name}: {scores[0].partition.text}")
        return scores[0].interval if others is None else scores[0].minus(scores[1])

    @cached_property
    def _bootstrap(self) -> Bootstrap:
        return Bootstrap(self.predictions.labelled)

    @cached_property
    def table_texts(self) -> TableTexts:
        """Return the texts that members read in the run's table; a DataError says why there are none."""
        return TableTexts(RunDir(self.run_dir), self.report, self.predictions.ids)


class TableTexts:
    """Read the columns that members read, if the run's table is still the same; none if they read no column.

    Raises:
        DataError: the table is gone, was written after the run, or has other rows than ``ids``.
    """

    def __init__(self, rundir: RunDir, report: RunReport, ids: pa.ChunkedArray) -> None:
        self._rows = report.rows
        self._columns: dict[str, pa.ChunkedArray] = {}
        if not report.null_texts:
            return
        path = report.table_path()
        changed = f"{path} has changed since the run"
        id_column = read_header(next(rundir.predictions_dir.glob("*.csv")))[0]
        try:
            if path.stat().st_mtime > rundir.run_json.stat().st_mtime:
                raise DataError(f"{changed}; run the config again")
            for limit in (report.rows, None):  # a run may leave out rows without a label
                contents = read_contents(path, Wanted(id_column, None, tuple(report.null_texts), limit))
                if contents.ids is None or contents.rows < report.rows:
                    raise DataError(f"{changed}: it has fewer rows, or no column {id_column!r} of ids")
                table_ids = contents.ids
                places = places_among(ids, table_ids)
                if (places >= 0).all():
                    break
        except OSError as error:
            raise DataError(unreadable(path, error)) from error
        others = np.flatnonzero(places < 0)
        if not len(others):
            others = np.flatnonzero(places != np.sort(places))
        if len(others):
            raise DataError(f"{changed}: row {others[0] + 1:,} is another one")
        for name in report.null_texts:
            cells = table_ids if name == id_column else contents.columns.column(name)
            self._columns[name] = cells if contents.rows == len(ids) else cells.take(pa.array(places))

    def of_rows(self, rows: Sequence[int]) -> dict[int, dict[str, str]]:
        """Return the whole texts of some rows, by row (from 0) and column."""
        texts: dict[int, dict[str, str]] = {row: {} for row in rows}
        for name, column in self._columns.items():
            cells = cell_texts(pa.concat_arrays(column.take(pa.array([*texts])).chunks)).to_pylist()
            for row, cell in zip(texts, cells, strict=True):
                texts[row][name] = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else cell or ""
        return texts

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the UTF-8 bytes of the texts in each row, [rows]."""
        total = np.zeros(self._rows, np.int64)
        for column in self._columns.values():
            sizes = [pc.binary_length(cell_texts(chunk)) for chunk in column.chunks]
            total += np.concatenate([pc.fill_null(of_chunk, 0).to_numpy() for of_chunk in sizes])
        return total


def html(template: str, **values: object) -> Markup:
    """Fill in a Jinja template, a literal in the code and never text from anywhere else; see ``rendered``."""
    return Markup(_ENVIRONMENT.from_string(template).render(values))


def rendered(module: str, macro: str, **values: object) -> Markup:
    """Call a macro of the Jinja template ``NAME.j2`` that lies beside the module ``PACKAGE.NAME``.

    Values are escaped unless they are ``Markup`` themselves.  A value must not stand where escaping is not enough:
    unquoted, in a name, in an address (``href``, ``src``) or, except for a number, in ``style``.  Templates can
    call ``table`` and the filters at the end of this file.
    Classes of the page: ``say`` for the first sentence, ``note``, ``muted``, ``good``, ``bad``, ``problem``.
    """
    package, _, name = module.rpartition(".")
    return Markup(getattr(_ENVIRONMENT.get_template(f"{package}/{name}.j2").module, macro)(**values))


def _source(name: str) -> str:
    """Return the text of a file of a package, ``PACKAGE/FILE``, or of this one; it may lie in an archive."""
    package, _, file = name.rpartition("/")
    return resources.files(package or __package__).joinpath(file).read_text(encoding="utf-8")


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], left: Sequence[int] = (0,)) -> Markup:
    """Return a table, which scrolls sideways in a frame of its own if the window is narrow.

    Columns without any content are left out; without rows there is no table.

    Args:
        rows: cells of each row: texts, or ``Markup``.
        left: numbers of the columns that hold text; the others hold numbers and are aligned to the right.
    """
    if not rows:
        return Markup()
    places = [place for place in range(len(headers)) if any(str(row[place]) for row in rows)]
    return rendered(__name__, "table", headers=headers, rows=rows, places=places, left=left, long=_LONG)


def percent(share: float, digits: int = 1) -> str:
    """Return a share, such as 0.884, in percent."""
    return f"{number(100 * share, digits)}\N{NO-BREAK SPACE}%"


def number(value: float, digits: int = 4, sign: str = "") -> str:
    """Return a number with a minus sign; with ``sign="+"`` one above 0 has a sign, too."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:{sign}z.{digits}f}".replace("-", "\N{MINUS SIGN}")


def with_interval(metric: str, interval: Interval, is_difference: bool = False) -> Markup:
    """Return a metric, or a difference of two, with its interval, which is muted."""
    factor, digits, unit = 1, 4, ""
    if metric == "accuracy":  # in percent
        factor, digits = 100, 1
        unit = "\N{NO-BREAK SPACE}points" if is_difference else "\N{NO-BREAK SPACE}%"
    return html(
        "{{ value }}{{ unit }} <span class=muted>({{ low }} to {{ high }})</span>",
        value=number(factor * interval.value, digits, "+" if is_difference else ""),
        low=number(factor * interval.low, digits),
        high=number(factor * interval.high, digits),
        unit=unit,
    )


def shortened(name: str, most: int) -> str:
    """Return a name without its middle if it is too long, as names often differ in their ends."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FunctionLoader(_source),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals["table"] = table
_ENVIRONMENT.filters |= {"duration": duration, "number": number, "percent": percent, "plural": plural}
