"""Tables and sentences as lines of text."""

from __future__ import annotations

import io

import pytest

from ensemble.cli.layout import Table, page_width, wrapped
from ensemble.common.text import plural

TABLE = Table(
    ["member", "rows", "peak memory", "fit"],
    [["gemma", "2,000", "11.1 GiB", ""], ["a-longer-name", "17", "309.0 MiB", "tight"]],
    [["ensemble", "", "", ""]],
    texts=["fit"],
)


def test_a_table_that_fits_stands_upright() -> None:
    assert TABLE.lines(80) == [
        "member          rows  peak memory  fit",
        "----------------------------------------",
        "gemma          2,000     11.1 GiB",
        "a-longer-name     17    309.0 MiB  tight",
        "",
        "ensemble",
    ]


def test_headers_of_several_words_take_two_lines_where_that_saves_room() -> None:
    lines = Table(["member", "rows done", "log loss"], [["m", "17", "0.3984"]]).lines(80)
    assert lines[:2] == ["        rows", "member  done  log loss"]


def test_a_table_that_does_not_fit_is_turned() -> None:
    assert TABLE.lines(34) == [
        "gemma",
        "  rows            2,000",
        "  peak memory  11.1 GiB",
        "",
        "a-longer-name",
        "  rows                17",
        "  peak memory  309.0 MiB",
        "  fit              tight",
        "",
        "ensemble",
    ]


@pytest.mark.parametrize("width", range(1, 60))
def test_no_cell_is_ever_cut(width: int) -> None:
    printed = "\n".join(TABLE.lines(width))
    for row in (*TABLE.rows, *TABLE.totals):
        for cell in row:
            assert str(cell) in printed


def test_columns_without_content_are_left_out() -> None:
    assert Table(["a", "b", "c"], [["1", "", "3"]]).lines(80)[0] == "a  c"


def test_characters_of_two_columns_keep_the_columns_straight() -> None:
    lines = Table(["member", "rows"], [["模型", "1"], ["m", "22"]]).lines(80)
    assert lines[2:] == ["模型       1", "m         22"]


def test_sentences_end_their_lines_between_words() -> None:
    assert wrapped("a path that/is/longer/than/a/whole/line stays one", 20, later="") == [
        "a path",
        "that/is/longer/than/a/whole/line",
        "stays one",
    ]
    assert wrapped("it takes some 11.1 GiB, about 2:03:10 h, or 8.2 s", 20, later="") == [
        "it takes some",
        "11.1 GiB, about",
        "2:03:10 h, or 8.2 s",
    ]
    assert wrapped("one two three four five", 20, "error: ") == ["error: one two three", "  four five"]
    assert wrapped("word " * 100, None) == [("word " * 100).rstrip()]


def test_the_width_is_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    for columns, width in (("", None), ("60", 60), ("wide", None)):
        monkeypatch.setenv("COLUMNS", columns)
        assert page_width(file) == width
    monkeypatch.delenv("COLUMNS")
    assert page_width(file) is None


def test_counts() -> None:
    assert [plural(count, "chunk") for count in (0, 1, 2, 1200)] == [
        "0 chunks",
        "1 chunk",
        "2 chunks",
        "1,200 chunks",
    ]
    assert plural(2, "batch") == "2 batches"
