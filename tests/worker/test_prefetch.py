"""Token ids made before they are asked for: the same as without, whatever was hinted at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_texts, make_tokenizer
from tests.worker.test_predict import worker_spec

TEXTS = make_texts(90)


class Encoding:
    """The real tokenizer behind the callback that ``Prefetch`` is given; notes which thread did which rows."""

    def __init__(self, folder: Path) -> None:
        from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
        from ensemble.members.huggingface.scoring.encode import Prompt

        make_tokenizer(folder)
        spec = worker_spec(folder)
        self.prompt = Prompt(spec, load_tokenizer(spec), 64)
        self.calls: list[tuple[int, int, str]] = []
        self.steps_until: Callable[[], bool] = lambda: False

    def __call__(self, rows: Any, step: Any) -> Any:
        start, stop = int(rows[0]), int(rows[-1]) + 1
        self.calls.append((start, stop, threading.current_thread().name))
        while self.steps_until():
            step()
        return self.prompt.encode([{"text": text} for text in TEXTS[start:stop]], step)


@pytest.fixture
def encoding(tmp_path: Path) -> Encoding:
    return Encoding(tmp_path)


def check(encoded: Any, encoding: Encoding, start: int, stop: int) -> None:
    expected = encoding.prompt.encode([{"text": text} for text in TEXTS[start:stop]])
    np.testing.assert_array_equal(encoded.lengths, expected.lengths)
    for found, plain in zip(encoded.inputs["input_ids"], expected.inputs["input_ids"], strict=True):
        np.testing.assert_array_equal(found, plain)


def test_what_was_hinted_at_is_not_made_again(encoding: Encoding) -> None:
    from ensemble.members.huggingface.scoring.prefetch import Prefetch

    prefetch = Prefetch(encoding, in_background=True)
    steps: list[None] = []
    encoding.steps_until = lambda: not steps
    prefetch.prepare(np.arange(0, 30))
    prefetch.prepare(np.arange(0, 30))
    check(prefetch.take(np.arange(0, 30), lambda: steps.append(None)), encoding, 0, 30)
    assert encoding.calls == [(0, 30, "tokenizing_0")]
    assert steps, "a block made in the background is a sign of life of whoever waits for it"
    # The next hint may come before the rows of the last one are asked for.
    prefetch.prepare(np.arange(30, 60))
    prefetch.prepare(np.arange(60, 90))
    for start, stop in ((30, 60), (60, 90)):
        check(prefetch.take(np.arange(start, stop), lambda: None), encoding, start, stop)
    assert sorted(encoding.calls[1:]) == [(30, 60, "tokenizing_0"), (60, 90, "tokenizing_0")]


def test_a_wrong_hint_costs_nothing_but_time(encoding: Encoding) -> None:
    from ensemble.members.huggingface.scoring.prefetch import Prefetch

    prefetch = Prefetch(encoding, in_background=True)
    prefetch.prepare(np.arange(0, 10))
    check(prefetch.take(np.arange(40, 80), lambda: None), encoding, 40, 80)
    assert encoding.calls[-1] == (40, 80, "tokenizing_0")
    prefetch.prepare(np.arange(0, 10))
    prefetch.start_over(lambda: encoding.prompt.encode([]))
    before = len(encoding.calls)
    check(prefetch.take(np.arange(0, 10), lambda: None), encoding, 0, 10)
    assert encoding.calls[before:] == [(0, 10, "tokenizing_0")], "nothing is left of the hint"


def test_rows_that_nobody_wants_any_more_are_given_up_between_blocks(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.scoring import encode as prompt
    from ensemble.members.huggingface.scoring.prefetch import Prefetch

    monkeypatch.setattr(prompt, "BLOCK_ROWS", 10)
    rendered: list[Any] = []
    render = encoding.prompt.render

    def noting(row: Any) -> Any:
        rendered.append(row)
        return render(row)

    monkeypatch.setattr(encoding.prompt, "render", noting)
    prefetch = Prefetch(encoding, in_background=True)
    encoding.steps_until = lambda: len(encoding.calls) < 2  # for ever, if it were not given up
    prefetch.prepare(np.arange(0, 90))
    while not encoding.calls:
        time.sleep(0.01)
    encoded = prefetch.take(np.arange(80, 90), lambda: None)
    assert len(rendered) == 10, "the other rows need no tokens"
    check(encoded, encoding, 80, 90)


def test_errors_show_when_the_rows_are_asked_for(encoding: Encoding) -> None:
    from ensemble.members.huggingface.scoring.prefetch import Prefetch

    def broken(rows: Any, step: Any) -> Any:
        raise LookupError(threading.current_thread().name)

    prefetch = Prefetch(broken, in_background=True)
    prefetch.prepare(np.arange(0, 10))
    with pytest.raises(LookupError, match="tokenizing_0"):
        prefetch.take(np.arange(0, 10), lambda: None)


def test_on_a_cpu_a_hint_is_not_heeded(encoding: Encoding) -> None:
    from ensemble.members.huggingface.scoring.prefetch import Prefetch

    prefetch = Prefetch(encoding, in_background=False)
    prefetch.prepare(np.arange(0, 10))
    check(prefetch.take(np.arange(0, 10), lambda: None), encoding, 0, 10)
    assert [name for _, _, name in encoding.calls] == ["MainThread"]
