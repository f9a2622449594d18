"""What YAML text becomes, and which text is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ensemble.common.errors import ConfigError
from ensemble.config.document import MAX_BYTES, MAX_VALUES, parse, read_text
from tests.config.examples import read


def refused(text: str) -> str:
    """The one sentence with which the text is refused as a whole."""
    with pytest.raises(ConfigError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    assert problem.startswith("my config.yaml")
    return problem


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
    result = read(f"key: {word}").data["key"]
    assert result == (value.strip("'") if isinstance(value, str) else value)
    assert type(result) is type(value)


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
    assert document.lines["data",] == (0, 1)
    assert document.lines["data", "path"] == (0, 2)
    assert document.lines["models", 1] == (0, 6)
    assert document.lines["models", 1, "weight"] == (0, 7)


def test_small_numbers_are_keys_as_they_are_written() -> None:
    document = read("max_memory: {0: 14GiB, 12: 1GiB, cpu: 30GiB}")
    assert document.problems == ()
    assert document.data == {"max_memory": {"0": "14GiB", "12": "1GiB", "cpu": "30GiB"}}


def test_repeated_keys_are_each_reported() -> None:
    document = read("a: 1\nb:\n  c: 1\n  c: 2\na: 2\n")
    assert document.problems == (
        "a (line 1): given twice; again on line 5",
        "b.c (line 3): given twice; again on line 4",
    )


@pytest.mark.parametrize("key", ["010", "-1", "1.5", "true", "null", "~"])
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
        ('a: 1\nb: "x\\0"', ["(line 2, column 4)", "a NUL character"]),
        ('"\\ud800": 1', ["(line 1, column 1)", r"half of a character ('\ud800')"]),
        ("!!python/object:os.system {}", ["(line 1, column 1)", "the tag '!!python/object:os.system'"]),
        ("!!int x", ["(line 1, column 1)", "a whole number"]),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", ["not valid YAML"]),
    ],
)
def test_what_is_no_config_is_refused_in_a_sentence(text: str, words: list[str]) -> None:
    problem = refused(text)
    assert all(word in problem for word in words), problem


def test_the_pairs_of_json_are_one_character() -> None:
    assert read('{"\\ud83d\\ude00": "a\\uD83D\\uDE00"}').data == {"\U0001f600": "a\U0001f600"}


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
    assert document.lines["both", "a"] == (0, 1)
    assert document.lines["both", "c"] == (0, 3)


def test_a_merge_of_something_else_is_refused() -> None:
    (problem,) = read("a:\n  <<: 1\n  b: 2").problems
    assert problem == "a (line 1): << on line 2 needs a mapping, such as <<: *name"


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
        ("[" * 300 + "]" * 300, "nested"),
        ("{a: " * 300 + "}" * 300, "nested"),
        ("[" * 100_000, "nested"),
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
        folder: f"{folder} cannot be read (Is a directory); name a YAML file",
        tmp_path / "not here.yaml": f"{tmp_path / 'not here.yaml'}: no such file",
        latin / "below": f"{latin / 'below'} cannot be read (Not a directory)",
    }
    for path, words in expected.items():
        with pytest.raises(ConfigError) as caught:
            read_text(path)
        assert caught.value.problems[0].startswith(words)
