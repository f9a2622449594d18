"""Sizes of batches that are timed: which is kept, that no clock decides twice, and no row's bytes depend on it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.checkpoints import make_checkpoint, make_texts
from tests.worker.test_predict import LABELS, make_session, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
DEFAULT = 64


@pytest.mark.parametrize(
    ("speeds", "chosen", "tried"),
    [
        ({64: 100, 128: 110, 256: 120}, 256, [64, 128, 256, 64]),
        ({64: 100, 128: 110, 256: 111}, 128, [64, 128, 256, 64]),
        ({64: 100, 128: 102, 32: 101}, 64, [64, 128, 32]),
        ({64: 100, 128: 90, 32: 110}, 32, [64, 128, 32, 64]),
        ({64: 100, 128: None, 32: 99}, 64, [64, 128, 32]),
        ({64: 100, 128: 120, 256: None}, 128, [64, 128, 256, 64]),
        ({64: None}, 64, [64]),
    ],
)
def test_the_fastest_is_kept_where_it_is_worth_it(
    speeds: dict[int, float | None], chosen: int, tried: list[int]
) -> None:
    from ensemble.members.huggingface.scoring.token_budget import choose

    asked: list[int] = []

    def time_of(budget: int) -> float | None:
        asked.append(budget)
        return speeds[budget]

    found = choose(64, lambda budget: True, time_of)
    assert (found.token_budget, asked) == (chosen, tried)
    assert found.tokens_per_second == {
        budget: speed for budget, speed in sorted(speeds.items()) if speed is not None
    }


def test_a_clock_that_rises_is_no_gain_and_what_is_not_allowed_is_not_tried() -> None:
    from ensemble.members.huggingface.scoring.token_budget import choose

    rising = itertools.count(100, 20)
    found = choose(64, lambda budget: budget <= 128, lambda budget: float(next(rising)))
    assert found.token_budget == 64
    assert found.tokens_per_second == {64: 140.0, 128: 120.0}
    assert (
        found.text(64)
        == "batches of 64 tokens, the default of those timed (tokens/s: 140 with 64, 120 with 128)"
    )
    assert choose(64, lambda budget: budget < 64, lambda budget: 1.0).tokens_per_second == {}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tiny Llama as the worker's classifier, and 150 rows of tokens, of which some are the same."""
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.encode import Prompt

    spec = worker_spec(make_checkpoint(tmp_path_factory.mktemp("m"), "llama", LABELS))
    model = load(spec)
    rows = [{"text": text} for text in make_texts(150, longest=25)]
    encoded = Prompt(spec, model.tokenizer, model.max_length).encode(rows)
    return Classifier(model.model, model.pad_token_id), encoded


@pytest.fixture
def passes(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Padded tokens of each pass."""
    classifier, _ = loaded
    found: list[int] = []
    logits = classifier.logits

    def counted(encoded: Any, rows: Any, *others: Any) -> Any:
        found.append(len(rows) * int(encoded.lengths[rows].max()))
        return logits(encoded, rows, *others)

    monkeypatch.setattr(classifier, "logits", counted)
    return found


def room(tokens: int) -> Any:
    from ensemble.members.huggingface.scoring.batching import MemoryLimit

    return MemoryLimit(tokens * 10, 10.0, 0.0)


def budget_of(
    folder: Path,
    memory: Any = None,
    expected: int = 10**6,
    hardware: str = "T4",
    told: Path | None = None,
) -> Any:
    """``told``: the folder from which the parent has told what was found."""
    from ensemble.common.shards import token_budgets
    from ensemble.members.huggingface.scoring.token_budget import TimedBudget

    return TimedBudget(folder, DEFAULT, memory, hardware, token_budgets(told or folder), expected)


def on_record(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in folder.iterdir()]


def test_real_batches_are_timed_and_the_choice_is_that_of_the_first(
    loaded: tuple[Any, Any], passes: list[int], tmp_path: Path
) -> None:
    steps: list[None] = []
    timed = budget_of(tmp_path, room(10**6))
    tokens = timed.for_chunk(*loaded, lambda: steps.append(None))
    assert tokens in (32, 64, 128, 256)
    assert len(steps) == len(passes), "signs of life"
    assert max(passes) > DEFAULT, "sizes above the default are tried"
    assert on_record(tmp_path)[0].startswith(f'{{"token_budget": {tokens}, "tokens_per_second": {{')
    changed, note, seconds = timed.news()
    assert changed == (None if tokens == DEFAULT else tokens)
    assert f"batches of {tokens} tokens, the " in note
    assert seconds > 0
    assert timed.news() == (None, "", 0.0)
    passes.clear()
    (path,) = tmp_path.iterdir()
    path.write_text('{"token_budget": 96}', encoding="utf-8")  # as if the first one had found that
    assert timed.for_chunk(*loaded, lambda: None) == tokens, "for the rest of its life"
    for expected in (10**6, 0):
        assert budget_of(tmp_path, room(10**6), expected).for_chunk(*loaded, lambda: None) == 96
    elsewhere = budget_of(tmp_path / "of another node", room(10**6), told=tmp_path)
    assert elsewhere.for_chunk(*loaded, lambda: None) == 96
    assert not passes, "nothing is timed twice"
    assert budget_of(tmp_path, room(10**6), 0, "H200").for_chunk(*loaded, lambda: None) == DEFAULT


def test_of_two_that_time_at_once_both_take_what_the_first_has_written(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.scoring.token_budget import Choice, TimedBudget

    def timing(tokens: int, before: Callable[[], object] = lambda: None) -> Any:
        def timed(*arguments: Any) -> Choice:
            before()
            return Choice(tokens, {DEFAULT: 1.0, tokens: 2.0})

        return timed

    first, second = budget_of(tmp_path), budget_of(tmp_path)

    def meanwhile() -> None:
        monkeypatch.setattr(TimedBudget, "_timed", timing(128))
        assert first.for_chunk(*loaded, lambda: None) == 128

    monkeypatch.setattr(TimedBudget, "_timed", timing(32, meanwhile))
    assert second.for_chunk(*loaded, lambda: None) == 128
    assert second.news()[:2] == (128, ""), "its own times decided nothing"
    assert len(on_record(tmp_path)) == 1, "nothing half-written is left"


def test_what_cannot_be_recorded_is_not_taken(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.scoring.token_budget import Choice, TimedBudget

    monkeypatch.setattr(TimedBudget, "_timed", lambda *arguments: Choice(128, {64: 1.0, 128: 2.0}))
    assert budget_of(tmp_path / "gone").for_chunk(*loaded, lambda: None) == DEFAULT


def test_sizes_stay_within_memory_and_within_the_chunk(
    loaded: tuple[Any, Any], passes: list[int], tmp_path: Path
) -> None:
    from dataclasses import replace

    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    for name, memory in {"unknown": None, "little": room(130)}.items():
        (tmp_path / name).mkdir()
        budget_of(tmp_path / name, memory).for_chunk(*loaded, lambda: None)
        assert max(passes) <= DEFAULT, "twice as many leave no room to spare"
        passes.clear()
    few = encoded.lengths[:10]
    assert int(few.sum()) < 6 * DEFAULT
    part = replace(encoded, inputs={"input_ids": encoded.inputs["input_ids"][:10]}, lengths=few, first=None)
    crumb = budget_of(tmp_path, room(10**6))
    assert crumb.for_chunk(classifier, part, lambda: None) == DEFAULT
    assert not passes
    assert not crumb._is_settled, "the next chunk will tell"
    for name in ("free", "full"):
        (tmp_path / name).mkdir()
    budget_of(tmp_path / "free", room(10**6)).for_chunk(*loaded, lambda: None)
    first_large = next(number for number, padded in enumerate(passes) if padded > DEFAULT)
    with AllocatorLimit(fail_at=frozenset({first_large})) as limit:
        tokens = budget_of(tmp_path / "full", room(10**6)).for_chunk(*loaded, lambda: None)
    assert limit.refused == 1
    assert tokens <= DEFAULT, "what did not fit is not taken"


@pytest.mark.parametrize(
    ("rows", "stages", "tokens", "batches"),
    [(400, 2, 12_800, 16), (400, 4, 6400, 34), (2000, 2, 16_384, 63), (40, 2, 2048, 10), (2, 2, 2048, 1)],
)
def test_a_chunk_keeps_several_gpus_busy(rows: int, stages: int, tokens: int, batches: int) -> None:
    """Eight batches for each of them, unless batches would get too small or too large."""
    from ensemble.members.huggingface.scoring.batching import make_batches
    from ensemble.members.huggingface.scoring.encode import Encoded
    from ensemble.members.huggingface.scoring.token_budget import StageBudget

    lengths = np.full(rows, 512)
    encoded = Encoded({"input_ids": [np.arange(512)] * rows}, lengths, 0)
    scorer: Any = None
    budget = StageBudget(16_384, stages)
    assert budget.for_chunk(scorer, encoded, lambda: None) == tokens
    assert len(make_batches(lengths, tokens)) == batches
    assert budget.news() == (tokens if tokens != 16_384 else None, "", 0.0)


def test_a_members_batches_follow_from_the_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes from the worker that timed, one that found the record, and one that was told the budget."""
    from ensemble.common.protocol import ChunkDone, Predict
    from ensemble.members.huggingface.scoring.member import TextMember

    folder, texts = make_checkpoint(tmp_path / "m", "llama", LABELS), make_texts(150, longest=25)
    table = pa.table({"text": texts})
    schema = table.schema.with_metadata({b"ensemble.rows": str(len(texts)).encode()})
    with pa.ipc.new_file(tmp_path / "t.arrow", schema) as file:
        file.write_table(table)
    np.save(tmp_path / "o.npy", np.arange(len(texts)))
    paths = {"table_path": str(tmp_path / "t.arrow"), "order_path": str(tmp_path / "o.npy")}
    done: dict[str, Any] = {}
    record = tmp_path / "work"
    record.mkdir()
    for name in ("timed", "found", "told"):
        shards = tmp_path / name
        shards.mkdir()
        told = None if name != "told" else json.loads(on_record(record)[0])["token_budget"]
        events: list[Any] = []
        spec = worker_spec(folder, max_length=128, shards_dir=str(shards), token_budget=told, **paths)
        session = make_session(spec, events.append)
        session.load()
        assert isinstance(session.predictor, TextMember)
        assert session.predictor._budget is None, "on a CPU nothing is timed"
        if name != "told":
            budget = budget_of(record, room(10**6), 10**6 if name == "timed" else 0)
            session.predictor._budget = budget
            if name == "timed":  # as if it had taken years, which no other chunk will
                news = budget.news
                monkeypatch.setattr(budget, "news", lambda news=news: (*news()[:2], 1e9))
        session.predict(Predict(0, 0, len(texts)))
        session.wait()
        done[name] = events[-1]
        assert isinstance(done[name], ChunkDone)
    assert len({one.shard for one in done.values()}) == 1, "a shard's name has the digest of its bytes"
    assert len({one.counters.batches for one in done.values()}) == 1
    assert "of those timed" in done["timed"].note
    assert done["timed"].counters.predict_seconds == 0 < done["found"].counters.predict_seconds
    assert done["found"].note == done["told"].note == ""
    assert done["found"].token_budget == done["timed"].token_budget
