"""The report in a browser and as a file: nothing loaded, nothing run, readable wide, narrow, light and dark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ensemble.analysis.report.page import write_report
from tests.analysis.report.browser import COMMAND, Browser, browser
from tests.analysis.report.runs import EVIL, make_run
from tests.project import ROOT, python_path
from tests.sampling import one_in

PHONE = 390
# Web Content Accessibility Guidelines 2.2, 1.4.3: of text, and of large text.
MIN_CONTRAST = 4.5
MIN_TEXT = 12
MAX_BYTES = 3_000_000
in_chromium = pytest.mark.skipif(COMMAND is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of an ordinary run, and of one in which all that can be a text is an attack."""
    made = {}
    for name, is_evil in (("plain", False), ("evil", True)):
        folder = tmp_path_factory.mktemp(name)
        names = (
            ("gemma", "<img src=x onerror='window.harmed=1'>&$", "_llama") if is_evil else ("gemma", "llama")
        )
        make_run(folder, names, is_evil=is_evil)
        made[name] = folder / "report.html"
        assert write_report(folder / "run", made[name]) == []
    return made


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots stay: TEST_ARTIFACTS, or pytest's folder, which keeps those of the latest runs."""
    folder = Path(os.environ.get("TEST_ARTIFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@in_chromium
@pytest.mark.parametrize("is_dark", one_in(2, [False, True]), ids=["light", "dark"])
@pytest.mark.parametrize("width", [1000, PHONE])
@pytest.mark.parametrize("name", ["plain", "evil"])
def test_the_page_opens(
    tab: Browser, pages: dict[str, Path], artifacts: Path, name: str, width: int, is_dark: bool
) -> None:
    opened = tab.open(pages[name], width, is_dark)
    tab.screenshot(artifacts / f"report-{name}-{width}-{'dark' if is_dark else 'light'}.png")
    assert opened.messages == []
    assert opened.requests == [pages[name].as_uri()]
    assert tab.run("window.harmed === undefined")
    assert tab.run("document.documentElement.scrollWidth") <= width
    # Whatever is wider scrolls in a frame of its own, which is not.
    wide = tab.run(
        """[...document.querySelectorAll("body *")].filter(one =>
        one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".table, pre")
        ).map(one => one.outerHTML.slice(0, 200))"""
    )
    assert wide == []
    # The text of pictures can be read, in CSS pixels.
    sizes = tab.run(
        """[...document.querySelectorAll("svg text")].map(one => parseFloat(getComputedStyle(one).fontSize) *
        one.ownerSVGElement.getBoundingClientRect().width / one.ownerSVGElement.viewBox.baseVal.width)"""
    )
    assert sizes
    assert min(sizes) >= MIN_TEXT
    # A table that is wider than its frame says so: at the edge behind which there is more a shadow shows.
    frames = tab.run(
        """[...document.querySelectorAll(".table")].map(one => [one.scrollWidth > one.clientWidth,
        getComputedStyle(one).backgroundAttachment,
        getComputedStyle(one).backgroundImage.split("linear-gradient").length])"""
    )
    assert any(is_wider for is_wider, *_ in frames) or width != PHONE
    assert {(attachment, shadows) for _, attachment, shadows in frames} == {
        ("local, local, scroll, scroll", 5)
    }
    # Nothing is pressed into a column of single letters.
    squeezed = tab.run(
        """[...document.querySelectorAll("main *")].filter(one => !one.closest("svg") && one.getClientRects().length
        && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim().length > 20)
        && one.getBoundingClientRect().width < 60).map(one => one.outerHTML.slice(0, 200))"""
    )
    assert squeezed == []
    # Each picture scales to the window, and its text can be read.
    scales = tab.run(
        """[...document.querySelectorAll("svg")].map(one =>
        one.getBoundingClientRect().width / one.viewBox.baseVal.width * 8)"""
    )
    assert len(scales) >= 4
    assert min(scales) > 8.5, "pixels of the smallest text"
    assert max(scales) < 16
    names = tab.run("""[...document.querySelectorAll("svg")].map(one => one.getAttribute("aria-label"))""")
    assert all(names)
    contrasts = tab.run(
        """(() => {
        const numbers = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(Number);
        const light = colour => numbers(colour).map(one => one / 255)
            .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
            .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
        const page = light(getComputedStyle(document.body).backgroundColor);
        return [...document.querySelectorAll("body *")].filter(one => one.getClientRects().length
            && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim())).map(one => {
            const style = getComputedStyle(one), ink = light(one.closest("svg") ? style.fill : style.color);
            // In dark mode a picture is drawn for a light page and inverted.
            const paper = one.closest("svg") ? light("rgb(254, 254, 254)") : page;
            return [(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), one.textContent.slice(0, 40),
                one.closest("svg") !== null];
        }); })()"""
    )
    assert len(contrasts) > 50
    # Names on bars are in the paper's colour.
    faint = [
        (ratio, text)
        for ratio, text, is_drawn in contrasts
        if ratio < MIN_CONTRAST and not (is_drawn and ratio < 1.05)
    ]
    assert faint == []


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", ["plain", "evil"])
def test_the_file_holds_no_script_and_nothing_from_elsewhere(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text(encoding="utf-8")
    parser = _Parser()
    parser.feed(text)
    lengths = parser.text[parser.text.index("tokens lost in each") :]
    assert "77" in lengths[: lengths.index("512") + 20], "how much was cut of each row that was cut"
    assert not {"script", "img", "iframe", "object", "embed", "link", "form", "base"} & {*parser.tags}
    assert [
        attribute for attribute in parser.attributes if attribute[1].startswith("on") or attribute[1] == "src"
    ] == []
    ids = [value for _, name, value in parser.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value for _, name, value in parser.attributes if name in ("href", "xlink:href")]
    assert {link for link in links if not (link.startswith("#") and link[1:] in ids)} == set()
    named = [value for tag, name, value in parser.attributes if tag == "svg" and name == "aria-label"]
    assert len({*named}) == parser.tags["svg"] == parser.tags["figcaption"], (
        "each picture once, with its name"
    )
    assert "Workers of the devices over time" in named, "what ran where"
    assert re.findall(r"url\((?!#)", text) == []
    (policy,) = [
        value for tag, name, value in parser.attributes if tag == "meta" and "default-src 'none'" in value
    ]
    assert "script-src" not in policy
    if name == "evil":  # and it is all there to read, as it was written
        message, words = " ".join(" ".join(parser.text).split()), EVIL[0]
        assert "merged without _llama" in message
        assert f"computed by an earlier run on 01 January 2026: {words} {words}, on {words} " in message
        assert f"on {words}, {words}" in message, "where tune wrote the config"
        assert f"Platform: {words}." in message


@pytest.mark.long
def test_the_same_run_gives_the_same_bytes(tmp_path: Path, pages: dict[str, Path]) -> None:
    again = tmp_path / "again.html"
    assert write_report(pages["plain"].parent / "run", again) == []
    assert again.read_bytes() == pages["plain"].read_bytes()


@in_chromium
@pytest.mark.long
def test_a_million_rows(tab: Browser, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    make_run(tmp_path, rows=1_000_000)
    page = tmp_path / "report.html"
    began = time.monotonic()
    assert write_report(tmp_path / "run", page) == []
    record_property("seconds to write", time.monotonic() - began)
    record_property("bytes", page.stat().st_size)
    assert page.stat().st_size < MAX_BYTES
    assert tab.open(page, PHONE).messages == []
    opened = tab.run("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
    record_property("seconds to open", opened)


def test_characters_that_nobody_sees_are_written_out(pages: dict[str, Path]) -> None:
    text = pages["evil"].read_text(encoding="utf-8")
    assert not set("\u202e\x01") & set(text)
    assert "\\u202e \\u0001 _" in text


@pytest.mark.long
def test_a_folder_of_predictions_that_may_not_be_entered(tmp_path: Path) -> None:
    """One sentence, and no traceback for each section."""
    make_run(tmp_path)
    command = [sys.executable, "-m", "ensemble", "report", str(tmp_path / "run")]
    if os.geteuid() == 0:  # who may read everything
        if shutil.which("setpriv") is None:
            pytest.skip("root can read every folder, and setpriv is not there to give that up")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    folder = tmp_path / "run/predictions"
    folder.chmod(0)
    try:
        variables = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    finally:
        folder.chmod(0o755)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2, text
    assert "Traceback" not in text
    assert re.search(r"run/predictions.* cannot be read .*chmod a\+rx", text), text
    assert text.count("error: ") == 1


@pytest.mark.long
def test_many_members_are_all_shown(tmp_path: Path) -> None:
    make_run(tmp_path, [f"m{number}" for number in range(60)])
    page = tmp_path / "report.html"
    assert write_report(tmp_path / "run", page) == []
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert "The first 6 of 61; the table has all." in text
    assert "Of 1770 pairs the 30 that differ most." in text
