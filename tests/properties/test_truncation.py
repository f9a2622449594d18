"""Truncation by field, with tokenizers of the three kinds: never too long, and nothing lost that need not be."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.members.causal_lm.predictor import CausalSpec, ChatPrompt
from ensemble.members.huggingface.scoring.encode import Encoded, Prompt
from ensemble.members.huggingface.scoring.truncation import share_out
from tests.checkpoints import WORDS, make_sentencepiece, make_tokenizer, make_wordpiece
from tests.members.huggingface.scoring.test_predict import worker_spec
from tests.sampling import tries

MARKER: Final = " [...] "
TEMPLATE: Final = (
    "<instructions> say which is good\n{% for turn in prompt | fromjson %}<user>{{ turn }}</user>\n{% endfor %}"
    "<a>{{ a | fromjson | join(' ') }}</a>\n<b>{{ b }}</b> {{ note }} <which>"
)
# Fields that stand nowhere, twice, changed, and by number.
OTHERS: Final = (
    "{{ prompt | fromjson | join }}{{ a }}{{ prompt | fromjson | join('\n') }}{{ note }} which",
    "{{ note }} {% if b %}{{ b | upper }} {{ b }}{% endif %}",
    "{% for turn in prompt | fromjson %}{{ turn }}: {{ (a | fromjson)[loop.index0] }}\n{% endfor %}{{ note }}",
)
MAKERS: Final = {"bpe": make_tokenizer, "sentencepiece": make_sentencepiece, "wordpiece": make_wordpiece}
KEEPS: Final = ("head", "tail", "head_tail", "newest_turns", "newest_rounds")
ROUNDS: Final = (
    "which{% for turn in p | fromjson %}<r>{{ turn }}<1>{{ (a | fromjson)[loop.index0] }}<2>"
    "{{ (b | fromjson)[loop.index0] }}{% endfor %}<end> {{ note }}"
)

words = st.lists(st.sampled_from([*WORDS, "<eos>", "\n", "<a>"]), max_size=40).map(" ".join)
texts = st.lists(words | st.text(max_size=12) | st.sampled_from(["é😀" * 9, "ﬁ\u0301", "\ud800"]), max_size=3)
turns = st.lists(texts.map(" ".join), max_size=5)


@cache
def tokenizer(kind: str) -> Any:
    with TemporaryDirectory() as folder:
        return MAKERS[kind](Path(folder))


def prompt(kind: str, template: str, max_length: int, fields: dict[str, Any] | None) -> Prompt:
    truncation = None if fields is None else {"fields": fields, "marker": MARKER}
    spec = worker_spec(
        Path(), prompt_template=template, text_columns=(), max_length=max_length, truncation=truncation
    )
    return Prompt(spec, tokenizer(kind), max_length)


def ids(encoded: Encoded, row: int = 0) -> list[int]:
    result: list[int] = encoded.inputs["input_ids"][row].tolist()
    return result


def size(kind: str, text: str) -> int:
    return len(tokenizer(kind)([text], add_special_tokens=False)["input_ids"][0])


def rendered_by(member: Prompt) -> list[str]:
    """What the member's template renders from now on, as it is tried in shorter and shorter forms."""
    texts: list[str] = []
    template = member._truncation._template  # type: ignore[union-attr]
    render = template.render
    object.__setattr__(template, "render", lambda row: texts.append(render(row)) or texts[-1])  # type: ignore[func-returns-value]
    return texts


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    row = {
        "prompt": json.dumps(draw(turns), ensure_ascii=draw(st.booleans())),
        "a": json.dumps(draw(turns)),
        "b": draw(words | st.text(max_size=80, alphabet=st.characters(exclude_categories=["Cs"]))),
        "note": "the office",
    }
    share = st.floats(0.1, 10)
    fields = {
        column: {"share": draw(share), "keep": draw(st.sampled_from(KEEPS))}
        for column in ("prompt", "a", "b")
    }
    return draw(st.sampled_from([*MAKERS])), row, fields, draw(st.integers(60, 200))


@tries(160)
@given(case=cases())
def test_a_row_fits_and_what_must_not_be_cut_is_there(case: tuple[Any, ...]) -> None:
    kind, row, fields, max_length = case
    plain = prompt(kind, TEMPLATE, 100_000, None).encode([row])
    member = prompt(kind, TEMPLATE, max_length, fields)
    got = member.encode([row])
    if plain.lengths[0] <= max_length:
        assert ids(got) == ids(plain)
        assert (got.truncated_rows, got.cut_tokens) == (0, 0)
        return
    if got.problems:  # a header for each turn; but one is always left, and the rest has room in 100 tokens
        assert "even without prompt, a, b" in got.problems[0]
        assert max_length < 100
        return
    assert 1 <= got.lengths[0] <= max_length
    assert got.truncated_rows == 1
    assert got.cut_tokens == plain.lengths[0] - got.lengths[0] > 0
    seen = tokenizer(kind).decode(ids(got), skip_special_tokens=False)
    for whole in ("<instructions> say which is good", "the office <which>"):
        # What the tokenizer itself makes of it, without its spaces.
        known = tokenizer(kind).decode(tokenizer(kind)(whole, add_special_tokens=False)["input_ids"])
        assert re.sub(r"\s", "", known) in re.sub(r"\s", "", seen)


@tries(80)
@given(case=cases(), template=st.sampled_from(OTHERS))
def test_whatever_a_template_makes_of_its_columns_no_row_is_too_long(
    case: tuple[Any, ...], template: str
) -> None:
    kind, row, fields, max_length = case
    row["a"] = json.dumps((json.loads(row["a"]) + [""] * 5)[:5])
    used = {column: field for column, field in fields.items() if f"{column} " in template}
    got = prompt(kind, template, max_length, used).encode([row])
    assert not got.problems
    assert got.lengths[0] <= max_length


@tries(60)
@given(case=cases(), lengths=st.lists(st.integers(0, 200), min_size=3, max_size=3))
def test_fields_get_their_shares_and_lend_what_they_do_not_need(
    case: tuple[Any, ...], lengths: list[int]
) -> None:
    """A template of three marks, so that each field can be found again."""
    kind, _, fields, max_length = case
    chosen = {column: " ".join(WORDS[index % 30] for index in range(count)) for column, count in zip(
        "xyz", lengths, strict=True
    )}  # fmt: skip
    given_fields = dict(zip("xyz", fields.values(), strict=True))
    template = "{{ x }}\n0\n{{ y }}\n1\n{{ z }}\n2"
    member = prompt(kind, template, max_length, given_fields)
    seen = rendered_by(member)
    got = member.encode([chosen])
    if not got.truncated_rows:
        return
    # The last that fits is what was taken, or one that was as good.
    fitting = [text for text in seen if size(kind, text) + 3 >= got.lengths[0]]
    parts = re.split(r"\n\d(?:\n|$)", fitting[-1])[:3]
    assert got.lengths[0] >= max_length - 12, "room is used"
    counts = [size(kind, text) for text in chosen.values()]
    budgets = share_out(counts, [field["share"] for field in given_fields.values()], max_length - 8)
    for part, count, budget in zip(parts, counts, budgets, strict=True):
        if count <= budget - 8:
            assert MARKER not in part
            assert size(kind, part) == count
        else:
            assert abs(size(kind, part) - budget) <= 12


@tries(200)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.floats(0.01, 100)), min_size=1, max_size=5),
    st.integers(0, 900),
)
@example([(0, 1.0), (5, 1.0)], 3)
def test_nothing_of_the_room_is_lost(fields: list[tuple[int, float]], tokens: int) -> None:
    counts, shares = [count for count, _ in fields], [share for _, share in fields]
    given_tokens = share_out(counts, shares, tokens)
    assert sum(given_tokens) == min(tokens, sum(counts))
    for count, share, own in zip(counts, shares, given_tokens, strict=True):
        assert 0 <= own <= count
        assert own >= min(count, int(tokens * share / sum(shares) * (1 - 1e-9)))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("keep", KEEPS)
def test_what_is_kept(kind: str, keep: str) -> None:
    messages = [f"the act of doing {word}" for word in ("work", "food", "plants", "animal", "river")]
    room = size(kind, " ".join(messages[:2]) + MARKER) + 6
    rows = [{"t": json.dumps(messages)}, {"t": json.dumps([messages[0], " ".join(messages)])}]
    member = prompt(kind, "{{ t | fromjson | join('|') }}", room, {"t": {"share": 1.0, "keep": keep}})
    rendered: list[str] = []
    tokenize = member._truncation._tokenize  # type: ignore[union-attr]
    member._truncation._tokenize = lambda text: rendered.append(text) or tokenize(text)  # type: ignore
    got = member.encode([rows[0]])
    assert room - 3 <= got.lengths[0] <= room
    text = rendered[-1]
    assert text.count(MARKER) == 1
    front, _, back = text.partition(MARKER)
    whole = "|".join(messages)
    assert whole.startswith(front)
    assert whole.endswith(back.strip(" |"))
    if keep in ("head", "head_tail"):
        assert front.startswith(messages[0])
    if keep != "head":
        assert back.endswith(messages[-1])
    if keep in ("tail", "newest_turns", "newest_rounds"):
        assert not front
        assert "|".join(messages[-2:]) in back
    # Where the newest turn alone is too long it keeps its beginning, too.
    rendered.clear()
    member.encode([rows[1]])
    if keep in ("newest_turns", "newest_rounds"):
        assert rendered[-1].startswith("the act of doing work")
        assert rendered[-1].endswith("river")
        assert "|" not in rendered[-1]


def test_turns_that_a_template_counts_keep_their_places() -> None:
    template = "{% for q in p | fromjson %}{{ q }}={{ (a | fromjson)[loop.index0].content }};{% endfor %}"
    numbers = ("one", "two", "three", "four")
    row = {
        "p": json.dumps([f"{number} person" for number in numbers]),
        "a": json.dumps([{"role": "user", "content": f"{number} animal"} for number in numbers]),
    }
    fields = {"p": {"share": 1.0, "keep": "newest_turns"}, "a": {"share": 1.0, "keep": "newest_turns"}}
    member = prompt("bpe", template, 40, fields)
    text = tokenizer("bpe").decode(ids(member.encode([row])), skip_special_tokens=True)
    last = text.split(";")
    assert len(last) == 5
    assert last[3] == "four person=four animal"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[tuple[str, str, str]], int]:
    message = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)
    rounds = draw(st.lists(st.tuples(message, message, message), min_size=1, max_size=6))
    row = {name: json.dumps([item[place] for item in rounds]) for place, name in enumerate("pab")}
    return draw(st.sampled_from([*MAKERS])), {**row, "note": "office"}, rounds, draw(st.integers(40, 200))


@tries(120)
@given(case=conversations(), shares=st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_the_newest_rounds_stay_whole(case: tuple[Any, ...], shares: list[float]) -> None:
    """Turn i of all columns together, and no round that is gone leaves its headings behind.

    No turn is empty: of empty rounds only headings are left, which are more tokens than a marker.
    """
    kind, row, rounds, max_length = case
    fields = {
        name: {"share": share, "keep": "newest_rounds"} for name, share in zip("pab", shares, strict=True)
    }
    member = prompt(kind, ROUNDS, max_length, fields)
    rendered = rendered_by(member)
    got = member.encode([row])
    assert not got.problems
    assert got.lengths[0] <= max_length
    if not got.truncated_rows:
        return
    special = got.lengths[0] - max(
        size(kind, text) for text in rendered if size(kind, text) <= got.lengths[0]
    )
    text = next(text for text in rendered if size(kind, text) + special == got.lengths[0])
    _, *shown = text.removesuffix("<end> office").split("<r>")
    results = [tuple(re.split("<1>|<2>", item)) for item in shown]
    assert results[1:] == [*rounds[len(rounds) - len(results) + 1 :]], "whole but for the oldest"
    for part, whole in zip(results[0], rounds[len(rounds) - len(results)], strict=True):
        before, _, after = part.rpartition(MARKER) if MARKER in part else ("", "", part)
        assert whole.endswith(after.lstrip() if MARKER in part else after)
        if before:  # a newest round that is too long by itself keeps its beginnings, too
            assert len(results) == 1
            assert whole.startswith(before)
    # Nor would the round that is cut have fitted whole, nor the one before it if none is cut.
    more = len(results) + (results[0] == rounds[len(rounds) - len(results)])
    parts = "".join(f"<r>{p}<1>{a}<2>{b}" for p, a, b in rounds[len(rounds) - more :])
    markers = 3 * (size(kind, MARKER) + 2) + 12
    assert size(kind, f"which{parts}<end> office") > max_length - markers


def test_rows_without_rounds_keep_their_newest_turns_column_by_column() -> None:
    numbers = [f"{number} person" for number in ("one", "two", "three", "four", "five", "six")]
    fields = {name: {"share": 1.0, "keep": "newest_rounds"} for name in "pa"}
    member = prompt("bpe", "{{ p | fromjson | join('|') }} <a> {{ a | fromjson | join('|') }}", 36, fields)
    rows = [{"p": json.dumps(numbers), "a": json.dumps(numbers[:count])} for count in (6, 2)]
    got = member.encode(rows)
    texts = [tokenizer("bpe").decode(ids(got, row), skip_special_tokens=True) for row in range(2)]
    first, second = (text.split(" <a> ") for text in texts)
    assert first[0].strip().removeprefix("[...]") == first[1].strip().removeprefix("[...]")
    assert second[1].strip() == "one person|two person"
    assert second[0].endswith("five person|six person")


def test_rows_alike_as_a_whole_are_cut_column_by_column_and_equal_ones_once() -> None:
    """Two rows of one prompt, whose columns end in different places, and a copy of the first."""
    fields = {column: {"share": 1.0, "keep": "head"} for column in "xy"}
    member = prompt("bpe", "{{ x }} {{ y }}", 20, fields)
    some = ["person"] * 30
    rows = [{"x": " ".join(some[:n]), "y": " ".join(some[n:])} for n in (5, 25, 5)]
    got = member.encode(rows)
    assert got.first is not None
    assert got.first.tolist() == [0, 1, 0]
    assert got.truncated_rows == 3
    long = [{**rows[0], "x": "animal " * 50} for _ in range(2)]
    strict = prompt("bpe", "{{ x }} {{ y }}", 20, {"y": fields["y"]}).encode([*long, rows[0]])
    assert list(strict.problems) == [0, 1]
    assert "even without y" in strict.problems[1]


def test_what_cannot_work_is_told_before_any_row() -> None:
    fields = {"x": {"share": 1.0, "keep": "head"}}
    with pytest.raises(ValueError, match=r"for every row is [\d,]+ tokens, more than the 9 that max_length"):
        prompt("bpe", "say which of these is the good one {{ x }} and which is not", 9, fields)
    slow = type("SlowTokenizer", (), {"is_fast": False, "bos_token_id": 1})()
    slow.eos_token_id = slow.pad_token_id = None
    spec = worker_spec(
        Path(), prompt_template="{{ x }}", text_columns=(), truncation={"fields": fields, "marker": ""}
    )
    with pytest.raises(ValueError, match=r"SlowTokenizer does not map .* needs a fast tokenizer"):
        Prompt(spec, slow, 9)


CHAT: Final = (
    "<bos>{% for message in messages %}<{{ message.role }}>\n{{ message.content | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<answer>\n{% endif %}"
)


@tries(80)
@given(case=cases(), system=st.sampled_from([None, "say place or body, the office <which>"]))
def test_a_chat_and_its_instruction_stay_whole_around_columns_that_are_cut(
    case: tuple[Any, ...], system: str | None
) -> None:
    kind, row, fields, max_length = case
    max_length += 80
    known = tokenizer(kind)
    known.chat_template = CHAT
    shared = worker_spec(
        *(Path(),),
        **{"prompt_template": TEMPLATE, "text_columns": (), "max_length": max_length},
        truncation={"fields": fields, "marker": MARKER},
    )
    keys: dict[str, Any] = {
        "label_tokens": {},
        "single_token": False,
        "choices": None,
        "length_normalize": "none",
        "apply_chat_template": True,
    }
    member = ChatPrompt(CausalSpec(**vars(shared), **keys, system_instruction=system), known, max_length)
    instruction = [] if system is None else [{"role": "system", "content": system}]

    def chat(message: str) -> list[int]:
        messages = [*instruction, {"role": "user", "content": message}]
        return [*known.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]

    whole = chat(str(member.render(row)))
    seen = rendered_by(member)
    got = member.encode([row])
    if len(whole) <= max_length:
        assert ids(got) == whole
        assert (got.truncated_rows, got.cut_tokens) == (0, 0)
        return
    if got.problems:
        assert "even without prompt, a, b" in got.problems[0]
        return
    assert got.lengths[0] <= max_length
    assert (got.truncated_rows, got.cut_tokens) == (1, len(whole) - got.lengths[0])
    # All that the template says of every row, in a chat as transformers has it.
    assert any(ids(got) == chat(text) for text in seen)
    assert all(
        text.startswith("<instructions> say") and text.endswith(" the office <which>") for text in seen
    )
