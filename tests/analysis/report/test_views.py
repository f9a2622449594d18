"""How often the view changes the verdict, held against pandas and SciPy's bootstrap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import bootstrap

from ensemble.analysis.report.base import ReportData
from ensemble.analysis.report.results import Views, verdict_changes
from tests.analysis.report.runs import make_run

ROWS = 2_000


def test_the_share_of_rows_whose_verdict_changes() -> None:
    chooser = np.random.default_rng(0)
    first = chooser.dirichlet(np.ones(3), ROWS)
    second = 0.6 * first + 0.4 * chooser.dirichlet(np.ones(3), ROWS)
    second[:100] = np.nan  # rows that one view lacks
    changed = (pd.DataFrame(first).idxmax(axis=1) != pd.DataFrame(second).fillna(0).idxmax(axis=1))[100:]
    views = {"as_is": first, "swapped": second, "again": first, "of_no_row": np.full_like(first, np.nan)}
    changes = verdict_changes(views)
    assert [*changes] == [("as_is", "swapped"), ("as_is", "again"), ("swapped", "again")]
    share = changes["as_is", "swapped"]
    assert share.value == pytest.approx(changed.mean(), abs=1e-12)
    drawn = bootstrap((changed.to_numpy(float),), np.mean, method="percentile", rng=np.random.default_rng(1))
    expected = drawn.confidence_interval
    assert (share.low, share.high) == pytest.approx((expected.low, expected.high), abs=0.004)
    assert changes["as_is", "again"].value == 0
    assert changes["swapped", "again"].value == share.value


def test_a_run_without_views_has_no_such_section(tmp_path: Path) -> None:
    report = make_run(tmp_path)
    assert Views().html(ReportData(tmp_path / "run", report)) is None
