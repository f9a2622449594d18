"""How long truncation by field takes, beside the tokenizer's own, of a table like LMSYS's.

``python -m bench.truncation --rows 25000`` makes the rows, and has each way make the token ids of all of them in
turn, in this process and on all cores, as a worker does.  Every cell is a JSON list of one or more turns; texts and
tokenizer are made on the spot, lengths are those of people's conversations with chat models.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.data import Words, Writer
from bench.processes import Failed
from bench.rounds import say
from bench.sections import show
from bench.table import Spread
from bench.tokenizer import counted, made_up_words, save_tokenizer
from ensemble.members.huggingface.scoring.encode import Prompt

_SEED = 8
_MAX_LENGTH = 1024
_COLUMNS = ("prompt", "response_a", "response_b")
# The logarithms of their tokens are normal; median and spread.  Six of seven rows have a single turn.
_PROMPT = (50, 1.3)
_RESPONSE = (220, 0.85)
_MORE_TURNS = 0.14
_LONGEST_TOKENS = 8_000
_TEMPLATE = (
    "Which of two responses is better?\n{% for turn in prompt | fromjson %}"
    "<user>{{ turn }}</user>\n<a>{{ (response_a | fromjson)[loop.index0] }}</a>\n"
    "<b>{{ (response_b | fromjson)[loop.index0] }}</b>\n{% endfor %}The better one is"
)
_SHARES = {"prompt": 0.2, "response_a": 0.4, "response_b": 0.4}
_WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "the tokenizer's own, at one end": None,
    "by field, head and tail": {"keep": "head_tail"},
    "by field, the newest turns": {"keep": "newest_turns"},
    "by field, the newest rounds": {"keep": "newest_rounds"},
}
_CHUNK_ROWS = 4_096


def compare(rows: int, repeats: int, vocabulary: int = 32_000) -> list[dict[str, object]]:
    """Let every way have all rows ``repeats`` times, in turn.

    Returns:
        a row for each: seconds by the clock and of CPU, rows that were cut, and the tokens that rows have.

    Raises:
        Failed: a row came out too long, or was cut though it was not.
    """
    with tempfile.TemporaryDirectory(prefix="ensemble truncation ") as made:
        folder = Path(made)
        say(f"truncation: training a tokenizer and making {rows:,} rows ...")
        known = made_up_words(30_000)
        plain = Writer(Words(tuple(known), (1,) * len(known)), _SEED)
        texts = [plain.text(200) for _ in range(2_000)]
        tokenizer = save_tokenizer(folder, texts, vocabulary=vocabulary)
        table = make_rows(rows, counted(folder, known))
    _measure(tokenizer, table[:_CHUNK_ROWS], None)  # a tokenizer remembers words
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
    facts: dict[str, tuple[int, int]] = {}
    for number in range(repeats):
        for way, field in _WAYS.items():
            seconds, cpu_seconds, facts[way] = _measure(tokenizer, table, field)
            found[way].append((seconds, cpu_seconds))
            say(
                f"truncation: round {number + 1} of {repeats}: {way}: {seconds:.1f} s, {cpu_seconds:.1f} s of CPU"
            )
    if len({cut for cut, _ in facts.values()}) > 1:
        raise Failed(f"not the same number of rows were cut: {facts}")
    return [
        {
            "way": way,
            "s": Spread.of([one for one, _ in samples]).text(1),
            "CPU s": Spread.of([one for _, one in samples]).text(1),
            "rows cut": f"{facts[way][0]:,} of {rows:,}",
            "tokens a row": f"{facts[way][1] / rows:,.0f}",
        }
        for way, samples in found.items()
    ]


def make_rows(rows: int, words: Words) -> list[dict[str, object]]:
    """Rows of three columns, each a JSON list of as many turns as the others' of the row."""
    chooser, writer = random.Random(_SEED), Writer(words, _SEED)

    def turn(median: float, spread: float) -> str:
        return writer.text(min(_LONGEST_TOKENS, 1 + int(median * exp(chooser.gauss(0.0, spread)))))

    table = []
    for number in range(rows):
        turns = 1
        while turns < 30 and chooser.random() < (_MORE_TURNS if turns == 1 else 0.5):
            turns += 1
        cells = [[turn(*(_RESPONSE if place else _PROMPT)) for _ in range(turns)] for place in range(3)]
        row = dict(zip(_COLUMNS, map(json.dumps, cells), strict=True))
        table.append(cast(dict[str, object], {"id": str(number), **row}))
    return table


def _measure(
    tokenizer: Any, table: Sequence[Mapping[str, object]], field: Mapping[str, Any] | None
) -> tuple[float, float, tuple[int, int]]:
    fields = {column: {"share": share, **(field or {})} for column, share in _SHARES.items()}
    spec = SimpleNamespace(  # all that it asks for
        prompt_template=_TEMPLATE,
        text_columns=(),
        add_special_tokens=True,
        truncation=None if field is None else {"fields": fields, "marker": " [...] "},
    )
    began, cpu_began, cut, tokens = time.monotonic(), time.process_time(), 0, 0
    prompt = Prompt(cast(Any, spec), tokenizer, _MAX_LENGTH)
    for start in range(0, len(table), _CHUNK_ROWS):
        encoded = prompt.encode(table[start : start + _CHUNK_ROWS])
        if encoded.problems or encoded.lengths.max() > _MAX_LENGTH:
            raise Failed(f"rows are too long, or have problems: {encoded.problems}")
        cut += encoded.truncated_rows
        tokens += int(encoded.lengths.sum())
    return time.monotonic() - began, time.process_time() - cpu_began, (cut, tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.truncation", description=__doc__)
    parser.add_argument("--rows", type=int, default=25_000, metavar="N")
    parser.add_argument("--repeats", type=int, default=1, metavar="K", help="rounds; 1 where nothing is said")
    options = parser.parse_args(arguments)
    return show(lambda: compare(options.rows, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
