"""``${NAME}`` in text values."""

from __future__ import annotations

import pytest

from ensemble.config.document import expand
from tests.config.examples import read

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
        ("${BAD}", "the value of the environment variable BAD is not UTF-8 text"),
    ],
)
def test_variables_that_cannot_be_put_in_are_named(text: str, words: str) -> None:
    document = read(f"a: 1\nb: ['x', '{text}']")
    expand(document, ENVIRON)
    (problem,) = document.problems
    assert problem.startswith(f"b[1] (line 2): {words}")
    assert "secret" not in problem
