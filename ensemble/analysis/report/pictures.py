"""Pictures of the report: Matplotlib's SVG, made fit for a page that may be light or dark, wide or narrow."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ensemble.analysis.report.base import html
from ensemble.common import gpus
from ensemble.pipeline.run_report import RunReport

# What is drawn in one of these colours is shown in that of the page's variable: (light, dark).
INK: Final = "#1f2328"
MUTED: Final = "#656d76"
GRID: Final = "#d8dee4"
PAPER: Final = "#fefefe"
SERIES: Final = ("#2f6fd1", "#d9730e", "#2b8a5c", "#b8408e", "#7d5bd1", "#8a6d1e", "#1a8ea2", "#c43c3d")
GOOD: Final = "#1a7f38"
BAD: Final = "#cf222f"
_DARK: Final = {
    INK: "#e6edf3",
    MUTED: "#9198a1",
    GRID: "#3d444d",
    PAPER: "#0d1117",
    GOOD: "#3fb950",
    BAD: "#f85149",
    **dict(
        zip(
            SERIES,
            ("#79a9f7", "#f0a35a", "#66c795", "#e388c5", "#b59cf6", "#d4b85c", "#5cc5d8", "#f0807f"),
            strict=True,
        )
    ),
}
# The widths that a picture can have, in CSS pixels: of a page as wide as text should be, and of a phone.
WIDE: Final = 720
NARROW: Final = 340
_POINTS_PER_PIXEL = 0.75
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and read out, and takes a fifth of the bytes
    "text.parse_math": False,  # a $ in the name of a member is a $
    "font.family": "DejaVu Sans",  # the one that Matplotlib brings along; the page's is narrower
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.facecolor": PAPER,
    "legend.edgecolor": GRID,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler('color', {[*SERIES]})",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.4,
}
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def picture(
    draw: Callable[[Figure], None],
    title: str,
    text: str,
    height: int,
    width: int = WIDE,
    narrow_height: int | None = None,
) -> Markup:
    """A picture with its caption; one that is wider than a phone is drawn a second time for those.

    Colours are ``INK``, ``MUTED`` and so on, which the page shows as they fit its light or dark mode; others stay
    as they are.  A label that begins with an underscore is left out of a legend: Matplotlib's rule.

    Args:
        draw: draws into an empty figure, whose layout is "constrained"; called once or twice.
        title: what is shown, in a few words; read out to those who cannot see it.
        text: what is to be seen, in a sentence or two: the caption.
        height: in CSS pixels, as are the others.
        width: at most ``WIDE``; the picture is never shown larger.
        narrow_height: of the second drawing, which is ``NARROW`` wide; as high as the first if None.
    """
    sizes = [(width, height, "wide" if width > NARROW else "")]
    if width > NARROW:
        sizes.append((NARROW, narrow_height or height, "narrow"))
    drawn = [_drawn(draw, title, text, *size) for size in sizes]
    return html(
        "<figure>{% for one in drawn %}{{ one }}{% endfor %}<figcaption>{{ text }}</figcaption></figure>",
        drawn=drawn,
        text=text,
    )


def shown_name(text: str, most: int = 24) -> str:
    """A name as it can stand in a legend, which leaves out what begins with an underscore."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return f"\u200b{text}" if text.startswith("_") else text


def device_names(report: RunReport) -> dict[str, str]:
    """Short names of a run's devices, in the report's order: GPU 0, GPU 1 on node-b, CPU; see gpus.device_names."""
    names = gpus.device_names(report.devices)
    used = {device for member in report.members for worker in member.workers for device in worker.devices}
    cpus = sorted(one for one in used if one.startswith("cpu"))  # "cpu", or that of a node
    return names | {"cpu": "CPU"} | {one: one.replace("cpu", "CPU", 1) for one in cpus}


def time_axis(axis: Axis, seconds: float) -> None:
    """Ticks at round times since the run's start, in the unit that goes with ``seconds``, its length."""
    unit, name = next(
        ((size, name) for size, name in ((3600.0, "h"), (60.0, "min")) if seconds >= 3 * size), (1.0, "s")
    )
    axis.set_major_formatter(lambda value, place: f"{value / unit:g}")
    step = MaxNLocator(nbins=6, steps=[1, 2, 5, 10]).tick_values(0.0, seconds / unit)
    axis.set_ticks([tick * unit for tick in step if tick * unit <= seconds * 1.001])
    axis.set_label_text(f"{name} since the run's start")


def thinned(points: Sequence[tuple[float, float]], most: int = 600) -> list[tuple[float, float]]:
    """Not many more than ``most`` points of a curve: of each stretch of it the lowest and the highest one."""
    if len(points) <= most:
        return [*points]
    size = -(-2 * len(points) // most)
    found = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {stretch.index(least) for least in (min(stretch, key=_height), max(stretch, key=_height))}
        found += [stretch[place] for place in sorted(ends)]
    return [points[0], *found, points[-1]]


def _height(point: tuple[float, float]) -> float:
    return point[1]


def colours() -> Iterator[tuple[str, str, str]]:
    """The variables of the page: name, light, dark."""
    for light, dark in _DARK.items():
        yield _variable(light), light, dark


def _variable(colour: str) -> str:
    return f"--c{colour[1:]}"


def _drawn(
    draw: Callable[[Figure], None], title: str, text: str, width: int, height: int, kind: str
) -> Markup:
    buffer = io.BytesIO()
    fonts = logging.getLogger("matplotlib")
    level = fonts.level
    fonts.setLevel(logging.ERROR)  # what DejaVu lacks, such as Chinese, the reader's machine has
    try:
        with mpl.rc_context({**_STYLE, "svg.hashsalt": title}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            size = (width * _POINTS_PER_PIXEL / 72, height * _POINTS_PER_PIXEL / 72)
            figure = Figure(figsize=size, layout="constrained")
            FigureCanvasSVG(figure)
            draw(figure)
            figure.savefig(buffer, format="svg", metadata={"Date": None})
    finally:
        fonts.setLevel(level)
    root = ElementTree.fromstring(_NOT_XML.sub("\ufffd", buffer.getvalue().decode()))
    # Two pictures of a page have the same ids for different things.
    prefix = hashlib.sha256(f"{title} {kind} ".encode() + buffer.getvalue()).hexdigest()[:8]
    _tidy(root, prefix)
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "width": str(width),
        "height": str(height),
        "class": kind,
        "role": "img",
        "aria-labelledby": f"{prefix}t {prefix}d",
    }
    for place, (tag, words) in enumerate((("title", title), ("desc", text))):
        element = ElementTree.Element(tag, id=f"{prefix}{tag[0]}")
        element.text = _NOT_XML.sub("\ufffd", words)
        root.insert(place, element)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _tidy(root: ElementTree.Element, prefix: str) -> None:
    """Take out what a page needs not or may not have: namespaces, styles for all of it, ids that are not unique."""
    named = set()
    for element in root.iter():
        for value in element.attrib.values():
            named |= set(re.findall(r"(?:url\(#|^#)([^)]+)\)?", value))
    for element in root.iter():
        for child in [*element]:
            if child.tag in (f"{_SVG}style", f"{_SVG}metadata"):
                element.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
        if element.attrib.get("id") not in named:
            element.attrib.pop("id", None)
        attributes = {}
        for name, value in element.attrib.items():
            if name == "id":
                value = prefix + value
            elif name == _HREF:
                name, value = "href", value.replace("#", f"#{prefix}", 1) if value.startswith("#") else value
            else:
                value = value.replace("url(#", f"url(#{prefix}")
            if name == "style":
                value = re.sub(r"(font: [^;']*?px)[^;]*", r"\1 var(--font)", value)
                value = re.sub(r"font-family:[^;]*", "font-family: var(--font)", value)
                value = re.sub("#[0-9a-f]{6}", lambda hit: _shown(hit[0]), value)
            if name in ("d", "transform", "x", "y", "points", "width", "height"):
                value = " ".join(_LONG_NUMBER.sub(lambda hit: f"{float(hit[0]):.2f}", value).split())
            attributes[name] = value
        element.attrib = attributes


def _shown(colour: str) -> str:
    return f"var({_variable(colour)})" if colour in _DARK else colour
