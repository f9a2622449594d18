"""The published table with other members' predictions behind its columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ensemble.data.published_table import PublishedTable, write_inputs
from ensemble.data.table import InputTable

ROWS = 70_000  # in two record batches
INPUTS = ("m/a", "m/b")


@pytest.mark.parametrize("with_columns", [True, False])
def test_inputs_are_columns_behind_those_of_the_table(tmp_path: Path, with_columns: bool) -> None:
    """They are there once rows are read, and a view that swaps columns reads them as they are."""
    columns = {"x": [f"x{row}" for row in range(ROWS)], "y": [f"y{row}" for row in range(ROWS)]}
    cells = pa.table(columns if with_columns else {})
    ids = pa.chunked_array([[f"r{row}" for row in range(ROWS)]])
    InputTable(cells, ids, None, {}).publish(tmp_path / "table.arrow", with_ids=True)
    swaps = [{}, {"x": "y", "y": "x"}]
    table = PublishedTable(tmp_path / "table.arrow", swaps, tmp_path / "inputs.arrow", INPUTS)
    assert table.columns == (*cells.column_names, *INPUTS)
    assert [str(table.schema.field(name).type) for name in INPUTS] == ["double", "double"]
    values = np.random.default_rng(0).random((ROWS, 2))
    values[3] = np.nan
    write_inputs(tmp_path / "inputs.arrow", INPUTS, values)
    rows = np.array([66_001, 3, 66_001, 0])
    for job, (x, y) in enumerate((("x", "y"), ("y", "x"))):
        table.use_job(job)
        expected = [
            ({"x": f"{x}{row}", "y": f"{y}{row}"} if with_columns else {})
            | {name: None if row == 3 else value for name, value in zip(INPUTS, values[row], strict=True)}
            for row in rows.tolist()
        ]
        assert table.take(rows) == expected
        names = [*INPUTS[::-1], *cells.column_names]
        batches = [*table.batches(np.sort(rows), names)]
        assert [batch.schema.names for batch in batches] == [names, names]
        read = [row for batch in batches for row in batch.to_pylist()]
        assert read == [expected[place] for place in np.argsort(rows, kind="stable")]
    assert table.ids(rows) == ["r66001", "r3", "r66001", "r0"]
