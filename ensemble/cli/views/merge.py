"""Show a merge of files: the rows and the weight of each, the method, and the file that was written."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.commands.merge_files import Merged
from ensemble.common.remote_files import address_of
from ensemble.common.text import plural, shown_path
from ensemble.config.values import weight_text


def view(merged: Merged) -> Iterator[str | Table]:
    rows = [
        (name, f"{merged.rows_of[name]:,}", weight_text(weight)) for name, weight in merged.weights.items()
    ]
    yield Table(["file", "rows", "weight"], rows)
    yield f"merge method: {merged.method}"
    yield from (f"! {remark}" for remark in merged.remarks)
    path = address_of(merged.path) or shown_path(merged.path)
    yield f"{path}: {plural(merged.rows, 'row')} of {', '.join(merged.labels)}"
