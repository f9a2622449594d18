"""A member proves itself before its first chunk: its tokenizer, its weights, its attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import WORDS, make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, predictor, worker_spec
from tests.members.huggingface.scoring.test_warmup import CASES, encoded_of, model_of, softmax
from tests.sampling import one_in
from tests.worker.test_session import publish

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def checked(model: Any, dtype: str = "float32", retry: bool = False) -> str:
    """What the comparison with eager says of a model."""
    from functools import partial

    from ensemble.members.huggingface.loading.float32_retry import in_float32
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.warmup import WarmUp

    classifier, mode = Classifier(model, 0), partial(in_float32, model) if retry else None
    warm_up = WarmUp(classifier, encoded_of([4, 14, 60]), softmax, dtype == "float32", mode)
    return warm_up.check_attention(model, dtype, is_asked=True)


def attentions(model: Any) -> list[str | None]:
    return [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]


@pytest.mark.parametrize(
    "name", sorted({*CASES} - {"olmo-clipped"})
)  # which transformers 5.0 does not classify with
def test_the_attention_of_every_family_agrees_with_eager_and_stays(name: str) -> None:
    import torch
    import transformers

    model = model_of(CASES[name][0](transformers))
    before, random = attentions(model), torch.get_rng_state()
    message = checked(model)
    assert message == "" or "was not compared with eager" in message
    assert message == "" or model._supports_sdpa
    assert attentions(model) == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "mixtral"])
def test_rounding_is_no_disagreement(name: str, dtype: str) -> None:
    import torch
    import transformers

    model = model_of(CASES[name][0](transformers)).to(getattr(torch, dtype))
    assert checked(model, dtype) == ""
    assert checked(model, dtype, retry=True) == ""


@pytest.fixture
def uncapped() -> str:
    """An attention that swallows the cap of scores, as "sdpa" of older transformers 5 does."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attention(*arguments: Any, softcap: float | None = None, **options: Any) -> Any:
        return sdpa_attention_forward(*arguments, **options)

    AttentionInterface.register("uncapped", attention)
    AttentionMaskInterface.register("uncapped", sdpa_mask)
    return "uncapped"


@pytest.mark.fault(30)
@pytest.mark.parametrize(("dtype", "retry"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_an_attention_that_leaves_a_rule_out_is_refused(dtype: str, retry: bool, uncapped: str) -> None:
    """As transformers 5.0 to 5.12 run Gemma-2 where attention is left to them: without capping its scores."""
    import torch
    import transformers

    config = CASES["gemma2"][0](transformers)
    config.attn_logit_softcapping = 0.2
    model = model_of(config)
    with torch.no_grad():  # scores that the cap matters to
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(8)
    model = model.to(getattr(torch, dtype))
    model.config._attn_implementation = "eager"
    assert checked(model, dtype, retry) == ""
    model.config._attn_implementation = uncapped
    message = r"attn_implementation: uncapped gives other numbers than eager .* logits differ by \d"
    with pytest.raises(ValueError, match=message):
        checked(model, dtype, retry)
    assert set(attentions(model)) == {uncapped}


@pytest.mark.fault(30)
def test_a_member_with_such_an_attention_fails_before_its_first_chunk(tmp_path: Path, uncapped: str) -> None:
    from ensemble.common.protocol import Failed, Predict, Started
    from tests.worker.test_session import served

    folder = make_checkpoint(tmp_path / "model", "gemma2", LABELS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_logit_softcapping": 0.1}))
    places = publish(tmp_path, {"text": make_texts(8)})
    code, events = served(worker_spec(folder, attn_implementation=uncapped, **places), Predict(0, 0, 8))
    assert code == 1
    assert [type(event) for event in events] == [Started, Failed]
    assert events[-1].message.startswith("attn_implementation: uncapped gives other numbers than eager")
    assert (events[-1].error_type, events[-1].can_retry) == ("ValueError", False)


def test_a_model_without_eager_attention_is_said_not_to_have_been_compared() -> None:
    import transformers

    model = model_of(CASES["llama"][0](transformers))

    def fails(*arguments: Any, **options: Any) -> Any:
        if model.config._attn_implementation == "eager":
            raise NotImplementedError("no such thing")
        return forward(*arguments, **options)

    attention = model.model.layers[0].self_attn
    forward, attention.forward = attention.forward, fails
    assert checked(model) == (
        "its attention (sdpa) was not compared with eager: LlamaForSequenceClassification does not run with that "
        "(NotImplementedError)"
    )
    assert set(attentions(model)) == {"sdpa"}


# --- tokenizers ---


def word_piece(folder: Path) -> Any:
    """BERT's own tokenizer, of a vocabulary that knows the words of the tests and single letters."""
    from transformers import BertTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,?!-'"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys([*letters, *WORDS])]
    words += [f"##{letter}" for letter in letters]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    return BertTokenizer(vocab=dict(zip(words, range(len(words)), strict=True)))


def byte_pairs(kind: str) -> Callable[[Path], Any]:
    """A byte-level tokenizer of one of transformers' own classes, trained on the words of the tests."""

    def make(folder: Path) -> Any:
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        special = {
            "RobertaTokenizer": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            "GPT2Tokenizer": ["<|endoftext|>"],
            "Qwen2Tokenizer": ["<|endoftext|>"],
        }[kind]
        trainer = trainers.BpeTrainer(
            vocab_size=380,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(WORDS * 3, trainer)
        state = json.loads(trained.to_str())["model"]
        merges = [tuple(merge) for merge in state["merges"]]
        return getattr(transformers, kind)(vocab=state["vocab"], merges=merges)

    return make


MADE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "BertTokenizer": ("bert", word_piece),
    "RobertaTokenizer": ("roberta", byte_pairs("RobertaTokenizer")),
    "GPT2Tokenizer": ("gpt2", byte_pairs("GPT2Tokenizer")),
    "Qwen2Tokenizer": ("llama", byte_pairs("Qwen2Tokenizer")),
}


def with_tokenizer(folder: Path, kind: str) -> Path:
    architecture, make = MADE[kind]
    make_checkpoint(folder, architecture, LABELS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    tokenizer = make(folder)
    tokenizer.save_pretrained(folder)
    import transformers

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokenizer)}))
    model = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    model.save_pretrained(folder)
    return folder


def notes_of(folder: Path, place: Path, texts: Sequence[str], **changes: Any) -> tuple[str, ...]:
    place.mkdir()
    return predictor(worker_spec(folder, **publish(place, {"text": list(texts)}), **changes)).load().notes


@pytest.mark.parametrize("kind", one_in(2, MADE))
def test_sound_tokenizers_of_their_own_classes_are_not_remarked_on(kind: str, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", kind)
    texts = [*make_texts(6), "Any  PLACE,\n\nwhere? 'of' 3.50!"]
    assert notes_of(folder, tmp_path / "place", texts) == ()


@pytest.mark.fault(28)
@pytest.mark.parametrize("kind", one_in(2, MADE))
def test_another_class_than_the_vocabulary_is_for(kind: str, tmp_path: Path) -> None:
    from ensemble.common.errors import CheckpointError
    from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
    from tests.checkpoints import inspect_folder

    folder = with_tokenizer(tmp_path / "model", kind)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    texts = make_texts(6)
    refused: dict[str, str] = {}
    passed_over: set[str] = set()
    for other in ("BertTokenizer", "RobertaTokenizer", "LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer"):
        changed = tmp_path / other
        shutil.copytree(folder, changed)
        (changed / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": other}))
        try:
            inspect_folder(changed, LABELS)
            assert notes_of(changed, tmp_path / f"place {other}", texts) == ()
        except (CheckpointError, ValueError) as error:
            refused[other] = str(error)
        else:  # as where GPT-2's class makes Roberta's tokens
            sound, other_one = (load_tokenizer(worker_spec(path)) for path in (folder, changed))
            assert sound(texts)["input_ids"] == other_one(texts)["input_ids"]
            if type(other_one).__name__ != other:  # transformers 5.0 to 5.5 go by tokenizer.json alone there
                passed_over.add(other)
    assert kind not in refused
    assert all("tokenizer" in message for message in refused.values())
    wrong = {"T5Tokenizer", "RobertaTokenizer" if kind == "BertTokenizer" else "BertTokenizer"}
    assert refused.keys() | passed_over >= wrong


def test_text_that_the_vocabulary_does_not_know_is_noted(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", "BertTokenizer")
    texts = ["Ни одного знакомого слова здесь нет и не было никогда"] * 3
    (note,) = notes_of(folder, tmp_path / "place", [*texts, "plants or food"])
    assert "of the tokens of its first 4 rows are [UNK]" in note
    with pytest.raises(ValueError, match="knows nothing of its first 3 rows"):
        notes_of(folder, tmp_path / "nothing", texts)


def test_text_that_does_not_come_back_is_noted(tmp_path: Path) -> None:
    """A vocabulary that lacks some bytes: those are left out without a token."""
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = stored["model"]["vocab"]
    for token in [token for token in vocabulary if "e" in token and token[0] != "<"]:
        vocabulary[token.replace("e", "\u01ff")] = vocabulary.pop(token)
    stored["model"]["merges"] = [pair for pair in stored["model"]["merges"] if "e" not in "".join(pair)]
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    notes = notes_of(folder, tmp_path / "place", make_texts(5))
    assert len(notes) == 1
    assert "which its own rules do not explain" in notes[0]


@pytest.mark.fault(28)
def test_ids_beyond_the_embeddings(tmp_path: Path) -> None:
    """Also where the vocabulary has no more tokens than the model has rows, but leaves numbers out."""
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    stored["model"]["vocab"]["~"] = 100_000
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match=r"knows 100001 tokens, its model only 359"):
        notes_of(folder, tmp_path / "place", make_texts(3))


# --- weights ---


def add_tensors(folder: Path, *names: str) -> None:
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name: np.ones((2, 2), "f") for name in names}}, path, {"format": "pt"})


@pytest.mark.fault(29)
def test_keys_that_went_nowhere(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "bert", LABELS)
    harmless = ("cls.predictions.bias", "cls.seq_relationship.weight", "lm_head.weight", "loss_fct.weight")
    add_tensors(folder, *harmless, "bert.embeddings.position_ids")
    assert notes_of(folder, tmp_path / "place", make_texts(3)) == ()
    add_tensors(folder, "bert.embeddings.special_embeddings.weight")
    with pytest.raises(
        ValueError, match=r"no place for: bert\.embeddings\.special_embeddings\.weight; they would"
    ):
        notes_of(folder, tmp_path / "place again", make_texts(3))


@pytest.mark.parametrize(("name", "is_noted"), [("reformer", True), ("bert", False)])
def test_a_model_that_draws_random_numbers_is_said_to(name: str, is_noted: bool, tmp_path: Path) -> None:
    import transformers

    folder = make_checkpoint(tmp_path / "model", "bert", LABELS)
    if name == "reformer":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        same = {key: config[key] for key in ("vocab_size", "hidden_size", "id2label", "label2id")}
        hashed: dict[str, Any] = {
            "attn_layers": ["lsh", "local"],
            "lsh_attn_chunk_length": 4,
            "local_attn_chunk_length": 4,
            "num_buckets": 4,
            "num_attention_heads": 4,
            "attention_head_size": 16,
            "axial_pos_embds": False,
            "max_position_embeddings": 128,
        }
        reformer = transformers.ReformerConfig(**same, **hashed)
        transformers.ReformerForSequenceClassification(reformer).save_pretrained(folder)
    notes = notes_of(folder, tmp_path / "place", make_texts(5))
    assert any("draws random ones" in note for note in notes) == is_noted, notes
