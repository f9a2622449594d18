"""What ``--set`` reaches, and what it does not."""

from __future__ import annotations

import pytest

from tests.config.examples import BASE, overridden


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


def test_an_override_of_one_alias_leaves_the_others() -> None:
    document = overridden("one: &one {a: 1}\ntwo: *one\n", "two.a=2")
    assert document.data == {"one": {"a": 1}, "two": {"a": 2}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("limit", "needs the form key=value"),
        ("", "needs the form key=value"),
        ("=1", "is not a path"),
        ("a..b=1", "is not a path"),
        (".".join("a" * 500) + "=1", "is not a path"),
        ("limit=[1", "not valid YAML"),
        ("limit=" + "[" * 300 + "]" * 300, "nested"),
        ("limit=*x", "undefined alias"),
        ("limit={a: 1, a: 2}", "limit.a: given twice"),
        ("limit=!x 1", "the tag"),
        ("limit=\udcff", "forbids"),
        ("models.gema.weight=1", "models has nothing named 'gema' (did you mean 'gemma'?)"),
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


def test_a_name_that_looks_like_a_position_is_a_name() -> None:
    assert overridden("models: [{name: a}, {name: '0'}]", "models.0.weight=1").data == {
        "models": [{"name": "a"}, {"name": "0", "weight": 1}]
    }


def test_an_override_takes_the_place_of_what_could_not_be_read() -> None:
    document = overridden("a: !x 1\n", "a=5")
    document.report(("a",), "must be less")
    assert document.problems == (
        "a (line 1): the tag '!x' is not allowed here; leave it out",
        "--set a=5: must be less, not 5",
    )
