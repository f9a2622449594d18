"""Templates: what they read, what they render, what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates
from ensemble.data.template import compile_template


@pytest.mark.parametrize(
    ("source", "columns", "json_columns"),
    [
        ("plain text", (), ()),
        ("{{ b }} {{ a }}", ("a", "b"), ()),
        ("{{ prompt | fromjson | join('\\n') }}", ("prompt",), ("prompt",)),
        ("{% set prompt = prompt | fromjson %}{{ prompt[0] }}", ("prompt",), ("prompt",)),
        ("{% for turn in turns|fromjson %}{{ turn }}{{ loop.index }}{% endfor %}", ("turns",), ("turns",)),
        ("{% set x = a %}{{ x | fromjson }}", ("a",), ()),
        ("{% if a is none %}{{ b }}{% else %}{{ range(3) | join }}{% endif %}", ("a", "b"), ()),
        ("{% macro show(x) %}[{{ x }}]{% endmacro %}{{ show(a) }}", ("a",), ()),
        ("{{ namespace(n=1).n }}{{ dict(k=_hidden) }}", ("_hidden",), ()),
    ],
)
def test_finds_the_columns_it_reads(
    source: str, columns: tuple[str, ...], json_columns: tuple[str, ...]
) -> None:
    template = compile_template(source)
    assert (template.columns, template.json_columns) == (columns, json_columns)
    assert template.source == source


@pytest.mark.parametrize(
    ("source", "row", "text"),
    [
        ("{{ a }}\n", {"a": "x", "other": 1}, "x\n"),
        ("<b>{{ a }}</b>", {"a": "<&'\">"}, "<b><&'\"></b>"),
        ("[{{ a }}|{{ none }}]", {"a": None}, "[|]"),
        ("{{ a ~ b }}{{ a | upper }}{{ a | trim }}", {"a": None, "b": "b"}, "b"),
        ("{{ 'gone' if a is none else 'here' }}", {"a": None}, "gone"),
        ("{{ 'gone' if a is none else 'here' }}", {"a": ""}, "here"),
        ("{{ a | fromjson | join(' ') }}", {"a": '["a", null]'}, "a "),
        ("{{ a | fromjson | join(' ') }}", {"a": ["a", None]}, "a "),
        ("{{ a | join(' ') }}", {"a": ["a", None, "b"]}, "a  b"),
        ("{{ (a | fromjson).k.z }}", {"a": '{"k": {"z": null}}'}, ""),
        ("{{ a.k }}", {"a": {"k": None}}, ""),
        ("{{ a | fromjson | length }}", {"a": None}, "0"),
        ("{{ a | tojson }}", {"a": ["<é>"]}, '["<é>"]'),
        ("{{ a + 1 }}", {"a": 1}, "2"),
        ("{{ a | fromjson | first }}", {"a": json.dumps(["\U0001f600"])}, "\U0001f600"),
        ("{{ a | fromjson | first }}", {"a": '["\\ud83d!"]'}, "\ufffd!"),
    ],
)
def test_renders(source: str, row: dict[str, object], text: str) -> None:
    assert compile_template(source).render(row) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{{ b", "line 2: "),
        ("{{ a }}\n{% if %}", "line 2: Expected an expression"),
        ("\n{{ a | nope }}", "line 2: no filter named 'nope'"),
        ("{% if a %}{{ a | nope }}{% endif %}", "no filter named 'nope'"),
        ("{{ a is odd_one }}", "no test named 'odd_one'"),
        ("{{ [1, 2] | random }}", "no filter named 'random'"),
    ],
)
def test_refuses_at_compile_time(source: str, words: str) -> None:
    with pytest.raises(TemplateProblem) as caught:
        compile_template(source)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,  # Python allows for twenty
        "{{ " + "1" * 5000 + " }}",
    ],
    ids=["brackets", "loops", "digits"],
)
def test_what_python_cannot_compile_is_a_problem_and_no_crash(source: str) -> None:
    with pytest.raises(TemplateProblem, match="cannot be compiled"):
        compile_template(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ a\n}}{{ a / 0 }}", "line 2: TypeError: unsupported operand"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ a.foo }}", "UndefinedError"),
        ("{{ a | fromjson }}", "line 1: not valid JSON (Expecting value at character 1): 'text'"),
        ("{{ missing }}", "no column 'missing'"),
    ],
)
def test_refuses_while_rendering(source: str, words: str) -> None:
    template = compile_template(source)
    with pytest.raises(TemplateProblem) as caught:
        template.render({"a": "text", "key": "__class__"})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (None, []),
        ("", []),
        ("  ", []),
        ("null", []),
        ("[]", []),
        ('["a", null, {"k": [null]}]', ["a", "", {"k": [""]}]),
        (["a", None], ["a", ""]),
        ({"k": None}, {"k": ""}),
        ("3", 3),
        (2.5, 2.5),
        ('"null"', "null"),
    ],
)
def test_parse_json_cell(cell: object, value: object) -> None:
    assert parse_json_cell(cell) == value


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ('["a" "b"]', "Expecting ',' delimiter at character 6"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not"),
        ("[" * 200_000, "nested too deep"),
        ("9" * 5000, "Exceeds the limit"),
        (b"[]", "type bytes"),
        ("x" * 1000, "xxx..."),
    ],
)
def test_parse_json_cell_refuses(cell: object, words: str) -> None:
    with pytest.raises(TemplateProblem) as caught:
        parse_json_cell(cell)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


def test_parsing_leaves_its_argument_alone() -> None:
    cell = ["a", None]
    parse_json_cell(cell)
    compile_template("{{ a }}").render({"a": cell})
    assert cell == ["a", None]


def test_lone_surrogates_are_replaced_and_nothing_else() -> None:
    assert replace_lone_surrogates("a\ud83db\ude00") == "a\ufffdb\ufffd"
    for text in ("", "plain", "é\U0001f600\ufffd"):
        assert replace_lone_surrogates(text) is text


def test_needs_nothing_but_jinja() -> None:
    code = (
        "import sys, ensemble.data.template; names = {name.split('.')[0] for name in sys.modules};"
        "print(sorted(names & {'numpy', 'pyarrow', 'torch', 'pandas'}))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
