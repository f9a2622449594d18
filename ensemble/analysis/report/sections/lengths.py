"""How long the rows are, and how many were cut."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import SERIES, picture, shown_name
from ensemble.common.errors import DataError
from ensemble.common.protocol import Counters
from ensemble.common.text import plural

_BINS = 40
_SHARES = (0.5, 0.9, 0.99, 1.0)


class Lengths(Section):
    title: ClassVar[str] = "Lengths and what was cut"

    def html(self, data: ReportData) -> Markup | None:
        report, rows = data.report, []
        for member in report.members:
            counters = sum(member.workers, Counters())
            limits = [one.max_length for one in member.workers if one.max_length is not None]
            if not counters.rows or not limits:
                continue
            cut = counters.truncated_rows
            of_rows = f" of {counters.rows:,} computed last" if member.reused_rows else ""
            share = html(
                '<span class="{{ kind }}">{{ cut }}{{ of_rows }} ({{ share }})</span>',
                kind="bad" if cut else "",
                cut=f"{cut:,}",
                of_rows=of_rows,
                share=f"{cut / counters.rows:.1%}",
            )
            computed = counters.rows - counters.repeated_rows
            mean = f"{counters.tokens / computed:,.0f}" if computed else ""
            lost = f"{counters.cut_tokens / cut:,.0f}" if cut and counters.cut_tokens else ""
            rows.append((member.name, f"{max(limits):,}", share, lost, mean, f"{counters.repeated_rows:,}"))
        parts = []
        try:
            lengths = data.text_bytes
        except DataError as error:
            parts.append(html('<p class="note">No lengths of the texts: {{ text }}</p>', text=str(error)))
        else:
            if len(lengths) and lengths.max() > 0:
                parts.append(_histogram(data, lengths))
        if rows:
            parts.append(
                table(
                    (
                        *("member", "max_length", "rows cut", "tokens that each of them lost"),
                        *("mean tokens", "rows that repeat others"),
                    ),
                    rows,
                )
            )
        empty = [f"{plural(count, 'row')} in {name}" for name, count in report.null_texts.items() if count]
        if empty:
            note = '<p class="note">Empty, or with a null turn: {{ text }}.</p>'
            parts.append(html(note, text=", ".join(empty)))
        return Markup().join(parts) if parts else None


def _histogram(data: ReportData, lengths: np.typing.NDArray[np.int64]) -> Markup:
    top = float(np.quantile(lengths, 0.995)) or float(lengths.max())
    width = max(1.0, np.ceil(top / _BINS))  # whole bytes, or some bars would have more lengths than others
    edges = np.arange(0.0, top + width, width)
    counts, _ = np.histogram(np.minimum(lengths, top), bins=edges)
    quantiles = ", ".join(
        f"{'the longest' if share == 1 else f'{share:.0%} up to'} {np.quantile(lengths, share):,.0f}"
        for share in _SHARES
    )
    # Rows with more tokens have more bytes, by and large: so many of the longest were cut.
    cut = {
        place: np.quantile(lengths, 1 - counters.truncated_rows / counters.rows)
        for place, member in enumerate(data.report.members)
        if (counters := sum(member.workers, Counters())).truncated_rows
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=SERIES[0])
        axes.set_xlabel("bytes of text that members read of a row")
        axes.set_ylabel("rows")
        axes.set_xlim(0, edges[-1])
        axes.grid(axis="x", visible=False)
        for place, length in cut.items():
            label = f"{shown_name(data.report.members[place].name)}: cut beyond, about"
            axes.axvline(min(length, top), color=SERIES[(place + 1) % len(SERIES)], label=label)
        if cut:
            figure.legend(loc="outside upper left", frameon=False)

    text = f"Bytes of text of a row: {quantiles}. The last bar has all that are longer."
    return picture(draw, "How long the rows are", text, 220)
