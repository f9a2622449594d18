"""Messages survive the line; what is no message is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Counters,
    Failed,
    Heartbeat,
    Predict,
    Ready,
    Stop,
    decode,
    encode,
)
from ensemble.members.huggingface.spec import ModelSpec
from tests.members.huggingface.scoring.test_predict import start, worker_spec


def test_every_message_comes_back_as_it_went() -> None:
    messages = [
        Predict(chunk=3, start=10, stop=20),
        Stop(),
        Ready(1.5, "cpu", "float32", "sdpa", 12, 128, 2048, ("a note", "another")),
        ChunkDone(
            3,
            "000-010.ab.csv",
            Counters(rows=10, bad_rows=2, tokens=100, forward_seconds=0.25),
            (17, 4),
            ("too long", "broken JSON"),
        ),
        ChunkFailed(3, "IndexError", "index 7 is out of bounds", "trace\nback"),
        Heartbeat(0.5),
        Failed("ValueError", "line one\nline two, \u2028 and \ud83d", "trace\nback", None),
    ]
    for message in messages:
        line = encode(message)  # type: ignore[arg-type]
        assert line.count("\n") == 1
        assert line.endswith("\n")
        assert decode(line) == message


def test_a_spec_keeps_what_the_user_wrote() -> None:
    settings = {"load_in_4bit": True, "llm_int8_skip_modules": ["score"]}
    spec = worker_spec(Path("a b/c"), quantization_config=settings, text_columns=("a", "b"))
    sent = start(spec)
    got = decode(encode(sent))
    assert (got.spec.kind, got.spec.common) == (sent.spec.kind, sent.spec.common)
    assert ModelSpec.of(got.spec.common, got.spec.settings) == spec
    assert got.spec.settings["quantization_config"]["llm_int8_skip_modules"] == ["score"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x",
        "[]",
        "{}",
        "null",
        '{"type": "Nope"}',
        '{"type": "Stop", "a": 1}',
        '{"type": ["Stop"]}',
        '{"type": "Start", "spec": {"kind": "k", "settings": {}}}',
    ],
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a message"):
        decode(line)


def test_every_counter_is_added_and_crosses_the_wire() -> None:
    names = [field.name for field in fields(Counters)]
    item = Counters(**{name: number for number, name in enumerate(names, 1)})
    assert vars(item + item) == {name: 2 * number for number, name in enumerate(names, 1)}
    assert sum([item, item, item], Counters()) == item + item + item
    assert decode(encode(ChunkDone(0, "part", item))).counters == item
    with pytest.raises(ValueError, match="not a message"):
        decode('{"type": "ChunkDone", "chunk": 0, "part": "p", "counters": {"unheard_of": 1}}')
