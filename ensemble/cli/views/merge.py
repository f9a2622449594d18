"""Show a merge of files: the rows and the weight of each, the method, and the file that was written."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.commands.merge_files import Merged
from ensemble.common.text import plural, shown_path
from ensemble.config.values import weight_text


def view(merged: Merged) -> Iterator[str | Table]:
    rows = [
        (name, f"{merged.rows_of[name]:,}", weight_text(weight)) for name, weight in merged.weights.items()
    ]
    yield Table(["file", "rows", "weight"], rows)
    yield f"merge method: {merged.method}"
    yield f"{shown_path(merged.path)}: {plural(merged.rows, 'row')} of {', '.join(merged.labels)}"
