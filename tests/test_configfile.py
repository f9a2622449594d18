from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble.configfile import (
    MAX_BYTES,
    MAX_VALUES,
    Document,
    apply_overrides,
    expand,
    parse,
    place,
    read_text,
)
from ensemble.errors import ConfigError

FILE = Path("my config.yaml")


def read(text: str) -> Document:
    return parse(text, FILE)


def refused(text: str) -> str:
    """The one sentence with which the text is refused as a whole."""
    with pytest.raises(ConfigError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    assert problem.startswith("my config.yaml")
    return problem


def overridden(text: str, *overrides: str) -> Document:
    document = read(text)
    apply_overrides(document, overrides)
    return document


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *((word, word) for word in ("yes", "no", "on", "off", "y", "N", "Yes", "OFF")),
        *(
            (word, word)
            for word in ("1:30", "2024-01-31", "2024-01-31 10:00:00", "1_000", "0b1", "=", "<<", "tRUE")
        ),
        *((word, word) for word in ("'12'", "'true'", "'null'")),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("012", 12),
        ("+3", 3),
        ("-3", -3),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e-5", 1e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("1e400", float("inf")),
        ("!!str 12", "12"),
        ("!!int '12'", 12),
        ("!!float 1", 1.0),
    ],
)
def test_words_are_those_of_yaml_1_2(word: str, value: object) -> None:
    found = read(f"key: {word}").data["key"]
    assert found == (value.strip("'") if isinstance(value, str) else value)
    assert type(found) is type(value)


def test_not_a_number_is_a_float() -> None:
    value = read("key: .NaN").data["key"]
    assert value != value


@pytest.mark.parametrize(
    "value", ["!!python/name:os.system x", "!!binary aGk=", "!!set {a}", "!mine x", "!!str [a]"]
)
def test_other_tags_are_refused(value: str) -> None:
    (problem,) = read(f"a: 1\nkey: {value}").problems
    assert problem.startswith("key (line 2): the tag ")


@pytest.mark.parametrize("value", ["!!int abc", "!!bool 1", "!!float x", "9" * 101, "0x" + "f" * 5000])
def test_numbers_that_are_none_are_refused(value: str) -> None:
    (problem,) = read(f"key: {value}").problems
    assert "cannot be read as" in problem
    assert len(problem) < 150


def test_lines_of_keys_and_items_are_known() -> None:
    document = read("data:\n  path: x\nmodels:\n  - name: a\n\n  - name: b\n    weight: 1\n")
    assert document.lines["data",] == 1
    assert document.lines["data", "path"] == 2
    assert document.lines["models", 1] == 6
    assert document.lines["models", 1, "weight"] == 7


@pytest.mark.parametrize(
    ("loc", "text"),
    [
        (("models", 1, "weight"), "models[1].weight"),
        (("label_map", "a b", "c.d"), "label_map['a b']['c.d']"),
        (("x\n",), "['x\\n']"),
        ((), "top level"),
    ],
)
def test_places_are_written_as_people_write_them(loc: tuple[str | int, ...], text: str) -> None:
    assert place(loc) == text


def test_repeated_keys_are_each_reported() -> None:
    document = read("a: 1\nb:\n  c: 1\n  c: 2\na: 2\n")
    assert document.problems == (
        "a (line 1): given twice; again on line 5",
        "b.c (line 3): given twice; again on line 4",
    )


@pytest.mark.parametrize("key", ["1", "1.5", "true", "null", "~"])
def test_keys_that_are_not_text_are_refused(key: str) -> None:
    (problem,) = read(f"a: 1\nb:\n  {key}: x").problems
    assert problem == f"b (line 2): the key '{key}' (line 3) must be text; put it in quotes"


def test_an_unquoted_template_is_explained() -> None:
    (problem,) = read("prompt: {{ text }}").problems
    assert "a value that starts with { needs quotes" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("# nothing\n", ["empty"]),
        ("null", ["empty"]),
        ("- a\n- b", ["must be a mapping", "not ['a', 'b']"]),
        ("hello", ["must be a mapping"]),
        ("a: 1\nb: c: d", ["(line 2, column 5)", "': ' inside must be in quotes"]),
        ("a:\n\tb: 1", ["(line 2, column 1)", "spaces, not tabs"]),
        ("a: [1, 2", ["(line 1, column 9)"]),
        ("a: 'b", ["(line 1, column 6)"]),
        ('a: "x" y', ["(line 1, column 8)", "indentation"]),
        ("a: @x", ["must be in quotes"]),
        ("a: 1\n---\nb: 1", ["second ---"]),
        ("a: *b", ["undefined alias 'b'"]),
        ("a: b\nc: \x00", ["(line 2, column 4)", "forbids"]),
        ('a: "\\UFFFFFFFF"', ["not valid YAML"]),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", ["not valid YAML"]),
    ],
)
def test_what_is_no_config_is_refused_in_a_sentence(text: str, words: list[str]) -> None:
    problem = refused(text)
    assert all(word in problem for word in words), problem


def test_aliases_and_merge_keys() -> None:
    document = read(
        "one: &one {a: 1, b: 1}\n"
        "two: &two {b: 2, c: 2}\n"
        "both: {<<: [*one, *two], c: 3}\n"
        "chain: &chain\n  <<: *two\n  d: 4\n"
        "end: {<<: *chain}\n"
        "copy: *one\n"
    )
    assert document.problems == ()
    assert document.data["both"] == {"a": 1, "b": 1, "c": 3}
    assert document.data["end"] == {"b": 2, "c": 2, "d": 4}
    assert document.data["copy"] == {"a": 1, "b": 1}
    assert document.lines["both", "a"] == 1
    assert document.lines["both", "c"] == 3


def test_a_merge_of_something_else_is_refused() -> None:
    (problem,) = read("a:\n  <<: 1\n  b: 2").problems
    assert problem == "a (line 1): << on line 2 needs a mapping, such as <<: *name"


def test_an_override_of_one_alias_leaves_the_others() -> None:
    document = overridden("one: &one {a: 1}\ntwo: *one\n", "two.a=2")
    assert document.data == {"one": {"a": 1}, "two": {"a": 2}}


def bomb(first: str, more: str) -> str:
    lines = [first]
    for before, name in pairwise("abcdefghij"):
        lines.append(f"{name}: &{name} {more.format(','.join([f'*{before}'] * 10))}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb("a: &a [x, x, x]\n", "[{}]"), "aliases"),
        (bomb("a: &a {x: 1}\n", "{{<<: [{}]}}"), "aliases"),
        ("a: &a [*a]", "nested"),
        ("a: &a {b: *a}", "nested"),
        ("a: &a {<<: *a}", "nested"),
        ("a: &a {<<: [*a, *a, *a]}", "nested"),
        ("[" * 300, "nested"),
        ("{" * 300, "nested"),
        ("- " * 300, "nested"),
        ("a: [" + "x," * MAX_VALUES + "]", "values"),
    ],
)
def test_bombs_are_refused(text: str, words: str) -> None:
    assert words in refused(text)


def test_text_is_read_exactly(tmp_path: Path) -> None:
    path = tmp_path / "my config.yaml"
    path.write_bytes("\ufeffa: é\r\nb: 2\r\n".encode())
    text = read_text(path)
    assert text == "\ufeffa: é\r\nb: 2\r\n"
    assert parse(text, path).data == {"a": "é", "b": 2}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    latin, large, folder = tmp_path / "a latin.yaml", tmp_path / "a large.yaml", tmp_path / "a folder.yaml"
    latin.write_bytes("a: 1\nb: é\n".encode("latin-1"))
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    folder.mkdir()
    wide = tmp_path / "wide.yaml"
    wide.write_bytes("a: 1".encode("utf-16"))
    expected = {
        latin: f"{latin} (line 2): not UTF-8 text",
        wide: f"{wide} (line 1): not UTF-8 text",
        large: f"{large}: larger than 1 MiB",
        folder: f"{folder}: a folder",
        tmp_path / "not here.yaml": f"{tmp_path / 'not here.yaml'}: no such file",
        latin / "below": f"{latin / 'below'}: cannot be read: Not a directory",
        Path("a\0b"): "'a\\x00b': cannot be read",
    }
    for path, words in expected.items():
        with pytest.raises(ConfigError) as caught:
            read_text(path)
        assert caught.value.problems[0].startswith(words)


BASE = """\
data: {path: a.csv}
labels: [a, b]
models:
  - name: gemma
    weight: 1
  - name: llama-3.1
    label_map: {x.y: a}
submission:
"""


@pytest.mark.parametrize(
    ("override", "loc", "value"),
    [
        ("data.path=b.csv", ("data", "path"), "b.csv"),
        ("limit=10", ("limit",), 10),
        ("limit=", ("limit",), None),
        ("data.path=a=b", ("data", "path"), "a=b"),
        ("labels=[yes, 012]", ("labels",), ["yes", 12]),
        ("labels.1=c", ("labels", 1), "c"),
        ("labels[1]=c", ("labels", 1), "c"),
        ("models.0.weight=0.5", ("models", 0, "weight"), 0.5),
        ("models[0].weight=0.5", ("models", 0, "weight"), 0.5),
        ("models.gemma.weight=1e-1", ("models", 0, "weight"), 0.1),
        ("models.llama-3.1.weight=2", ("models", 1, "weight"), 2),
        ("models.llama-3.1.label_map.x.y=b", ("models", 1, "label_map", "x.y"), "b"),
        ("models.0={name: new}", ("models", 0), {"name": "new"}),
        ("submission.sample=s.csv", ("submission",), {"sample": "s.csv"}),
        ("ensemble.deep.er=1", ("ensemble",), {"deep": {"er": 1}}),
        (" seed = 3", ("seed",), 3),
    ],
)
def test_overrides(override: str, loc: tuple[str | int, ...], value: object) -> None:
    document = overridden(BASE, override)
    assert document.problems == ()
    assert document.value(loc) == value


def test_the_later_override_wins() -> None:
    assert overridden(BASE, "limit=1", "limit=2").data["limit"] == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("limit", "needs the form key=value"),
        ("", "needs the form key=value"),
        ("=1", "is not a path"),
        ("a..b=1", "is not a path"),
        (".".join("a" * 500) + "=1", "is not a path"),
        ("limit=[1", "not valid YAML"),
        ("limit=" + "[" * 300, "nested"),
        ("limit=*x", "undefined alias"),
        ("limit={a: 1, a: 2}", "limit.a: given twice"),
        ("limit=!x 1", "the tag"),
        ("limit=\udcff", "forbids"),
        ("models.gema.weight=1", "models has nothing named 'gema'; did you mean 'gemma'?"),
        ("models.2.weight=1", "models has no position 2; it holds 2"),
        ("models.-1.weight=1", "models has nothing named '-1'"),
        ("models." + "9" * 5000 + "=1", "nothing named"),
        ("labels.x=1", "labels has nothing named 'x'"),
        ("data.path.x=1", "data.path is 'a.csv' and has no keys inside"),
    ],
)
def test_overrides_that_make_no_sense_are_named(override: str, words: str) -> None:
    (problem,) = overridden(BASE, override).problems
    assert problem.startswith("--set ")
    assert words in problem
    assert len(problem) < 400
    assert problem.isprintable()


def test_a_name_that_looks_like_another_members_position_is_refused() -> None:
    text = "models: [{name: a}, {name: '0'}]"
    (problem,) = overridden(text, "models.0.weight=1").problems
    assert "both a position and the name of models[1]" in problem
    assert overridden("models: [{name: '0'}]", "models.0.weight=1").data == {
        "models": [{"name": "0", "weight": 1}]
    }


def test_problems_name_the_line_or_the_override() -> None:
    document = overridden(BASE, "models.0.weight=x", "new.key=1")
    document.report(("models", 0, "weight"), "must be a number")
    document.report(("models", 1, "label_map", "x.y"), "odd")
    document.report(("new",), "unknown")
    document.report(("elsewhere",), "missing")
    assert document.problems == (
        "--set models.0.weight=x: must be a number, not 'x'",
        "models[1].label_map['x.y'] (line 7): odd",
        "--set new.key=1: new: unknown",
        "elsewhere: missing",
    )


def test_an_override_takes_the_place_of_what_could_not_be_read() -> None:
    document = overridden("a: !x 1\n", "a=5")
    document.report(("a",), "must be less")
    assert document.problems == (
        "a (line 1): the tag '!x' is not allowed here",
        "--set a=5: must be less, not 5",
    )


ENVIRON = {"HOME_DIR": "/data", "N": "12", "EMPTY": "", "TOKEN": "hf_secret", "BAD": "\udcff"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${HOME_DIR}/a", "/data/a"),
        ("${HOME_DIR}${N}", "/data12"),
        ("${N}", "12"),
        ("x${EMPTY}", "x"),
        ("$${N}", "${N}"),
        ("$$${N}", "$${N}"),
        ("$N $ {N} 5$", "$N $ {N} 5$"),
        ("{{ text }}", "{{ text }}"),
    ],
)
def test_variables_are_put_in(text: str, value: str) -> None:
    document = read(f"a: '{text}'\nb: [{{c: '{text}'}}]\n'${{N}}': 1")
    assert expand(document, ENVIRON) == {"a": value, "b": [{"c": value}], "${N}": 1}
    assert document.problems == ()
    assert document.data["a"] == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${NOT_SET}", "the environment variable NOT_SET is not set; to keep ${NOT_SET}, write $${NOT_SET}"),
        ("${TOKEN} ${NOT_SET}", "the environment variable NOT_SET is not set"),
        ("${", "${ is not followed by a variable's name"),
        ("${}", "${ is not followed by a variable's name"),
        ("${A B}", "${ is not followed by a variable's name"),
        ("${BAD}", "has a character that is not text"),
    ],
)
def test_variables_that_cannot_be_put_in_are_named(text: str, words: str) -> None:
    document = read(f"a: 1\nb: ['x', '{text}']")
    expand(document, ENVIRON)
    (problem,) = document.problems
    assert problem.startswith(f"b[1] (line 2): {words}")
    assert "secret" not in problem


@pytest.mark.parametrize("text", ["\\0", "\\ud800"])
def test_characters_that_no_file_can_hold_are_refused(text: str) -> None:
    document = read(f'a: "{text}"')
    expand(document, {})
    assert document.problems == ("a (line 1): has a character that is not text",)


YAMLISH = st.text(alphabet="ab1.:-[]{}<&*!|>'\"#%@?,~$ \n\t\\x\ufeff\x00", max_size=40)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)  # type: ignore[untyped-decorator, unused-ignore]
@given(text=YAMLISH, override=YAMLISH)  # type: ignore[untyped-decorator, unused-ignore]
def test_any_text_is_read_or_refused(text: str, override: str) -> None:
    try:
        document = read(text)
    except ConfigError:
        document = read(BASE)
    apply_overrides(document, [override, f"models.{override}", f"data.x={override}", f"{override}=1"])
    expanded: dict[str, Any] = expand(document, {})
    assert isinstance(expanded, dict)
    assert not any("\n" in problem for problem in document.problems)
