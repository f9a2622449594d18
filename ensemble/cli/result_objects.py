"""Define what the Python API returns: the directory of a run, and a config that was checked and planned."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ensemble.cli.layout import lines
from ensemble.cli.status import RunStatus
from ensemble.common.errors import DataError
from ensemble.common.packages import demand_supported
from ensemble.common.redact import Redactor, redacted_errors
from ensemble.common.text import did_you_mean, quoted
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

if TYPE_CHECKING:
    import pandas as pd


class _Shown:
    """Show a notebook the printed text, and complete to public names only."""

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(repr(self))}</pre>'

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]


class Run(_Shown):
    """Read a run's directory, anew at each access. Printed, it shows what ``ensemble status`` shows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._rundir = RunDir(self.path)

    @property
    @redacted_errors()
    def report(self) -> RunReport:
        """Return what run.json says.

        Raises:
            DataError: it is not there yet, is damaged, or was written by another version.
        """
        return RunReport.read(self._rundir.run_json)

    @property
    @redacted_errors()
    def status(self) -> RunStatus:
        """Return how far the run is, or how it ended.

        Raises:
            DataError: as for ``report``.
        """
        return RunStatus.of(self.path)

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of the members whose predictions are complete."""
        try:
            members = self.report.members
        except DataError:  # files of an earlier run, perhaps with other settings
            return ()
        complete = (member.name for member in members if member.status == "complete")
        return tuple(name for name in complete if self._rundir.predictions(name).exists())

    @redacted_errors()
    def predictions(self, member: str) -> pd.DataFrame:
        """Return a member's probabilities: a column per label, rows in table order, ids as text in the index.

        Raises:
            DataError: they are not complete or were changed since, or there is no such member.
        """
        if member not in self.members:
            raise DataError(
                f"{self.path}: no predictions of {quoted(str(member))}"
                f"{did_you_mean(str(member), self.members)}; complete are: {', '.join(self.members) or 'none'}"
            )
        return _frame(self._rundir.predictions(member))

    @property
    @redacted_errors()
    def ensemble(self) -> pd.DataFrame:
        """Return the merged probabilities, in the form of ``predictions``.

        Raises:
            DataError: nothing has been merged.
        """
        if not self._rundir.ensemble.exists():
            raise DataError(f"{self.path}: there is no ensemble.csv; its run has merged nothing yet")
        return _frame(self._rundir.ensemble)

    @property
    @redacted_errors()
    def scores(self) -> pd.DataFrame:
        """Return metrics of the ensemble and its members by the true labels, with 95 % bootstrap intervals.

        The columns are ``member``, ``metric``, ``value`` and ``interval``, which is (low, high). AUC is the mean
        over folds where it is known which fold's model predicted each row (see docs/reference/metrics.md).

        Raises:
            DataError: the true labels are not known, or the run is not complete.
        """
        demand_supported(for_analysis=True)
        import pandas as pd

        from ensemble.analysis.compare import compare

        result = compare(self.path, self.path)
        if not result.metrics:
            raise DataError(result.remarks or [f"{self.path}: its config names no true labels"])
        rows = [
            (metric.name, metric.metric, metric.first.value, (metric.first.low, metric.first.high))
            for metric in result.metrics
        ]
        return pd.DataFrame(rows, columns=["member", "metric", "value", "interval"])

    def __repr__(self) -> str:
        try:
            return Redactor(os.environ)("\n".join(lines("status.status", self.status)))
        except DataError as error:  # a notebook shows it all the same
            return str(error)

    def _repr_html_(self) -> str:
        page = self._rundir.report_page
        if not page.is_file():
            return super()._repr_html_()
        link = f'<a href="{quote(os.path.relpath(page))}" target="_blank">{page.name}</a>'
        return f"{super()._repr_html_()}<p>{link}</p>"


class Preview(_Shown):
    """Hold a config that was checked and planned. Printed, it shows what ``validate`` or ``plan`` shows.

    Attributes:
        prepared: the results of all checks.
        config: with all defaults.
        plan: where each member would run, and how long the run would take.
        problems: why members fit nowhere, or not on some node of a cluster, a sentence each; empty if all fit.
    """

    def __init__(self, view: str, prepared: Prepared) -> None:
        self._view = view
        self.prepared = prepared
        self.config, self.plan, self.problems = prepared.config, prepared.plan, prepared.problems

    def __repr__(self) -> str:
        return self.prepared.loaded.redactor("\n".join(lines(f"plans.{self._view}", self.prepared)))


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    from ensemble.pipeline.prediction_files import read_as_written

    file = read_as_written(path)
    index = pd.Index(file.ids.to_pandas(), name=file.id_column)
    return pd.DataFrame(file.values, columns=list(file.labels), index=index)
