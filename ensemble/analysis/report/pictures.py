"""Draw the report's pictures as Matplotlib's SVG, in the page's font; they scale to the window."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Final

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ensemble.analysis.report import base

# In dark mode the page inverts a picture's lightness and keeps its hues.
INK: Final = "#1f2328"
MUTED: Final = "#656d76"
GRID: Final = "#d8dee4"
SERIES: Final = ("#2f6fd1", "#d9730e", "#2b8a5c", "#b8408e", "#7d5bd1", "#8a6d1e", "#1a8ea2", "#c43c3d")
# Of a picture, in CSS pixels: less than a phone is wide, so that its text can be read there.
WIDTH: Final = 340
_POINTS_PER_PIXEL = 0.75
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and read out, and takes a fifth of the bytes
    "text.parse_math": False,  # a $ in the name of a member is a $
    "font.family": "DejaVu Sans",  # comes with Matplotlib; the page's font is narrower
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.2,
}


def picture(draw: Callable[[Figure], None], title: str, text: str, height: float) -> Markup:
    """Return a picture with its caption, as SVG that fills a phone and is larger in a wide window.

    Args:
        draw: draws into an empty figure, whose layout is "constrained".
        title: what the picture shows, in a few words; screen readers read it out.
        text: the caption: what there is to see, in a sentence or two.
        height: in CSS pixels on a phone, where the width is ``WIDTH``.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": title}), warnings.catch_warnings():
        # The reader's machine may have glyphs that DejaVu lacks, such as Chinese.
        warnings.simplefilter("ignore")
        size = (WIDTH * _POINTS_PER_PIXEL / 72, height * _POINTS_PER_PIXEL / 72)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    drawing = svg[svg.index('<g id="figure_1">') : svg.rindex("</svg>")]
    # Other pictures have groups of the same names; the ids of shapes that are used again are of their own.
    drawing = re.sub(r'(<\w[^<>]*) id="[\w.]+_\d+"', r"\1", drawing)
    return base.rendered(
        base.__name__,
        "picture",
        width=f"{WIDTH * _POINTS_PER_PIXEL:g}",
        height=f"{height * _POINTS_PER_PIXEL:g}",
        widest=f"{WIDTH * 1.3:.0f}",  # in a wide window
        title=title,
        drawing=Markup(" ".join(drawing.split())),
        text=text,
    )
