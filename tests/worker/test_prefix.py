"""Texts that begin alike: the plain tokenizer's ids, whatever the tokenizer, the texts and where they are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

INSTRUCTIONS = (
    "You are given two answers to a question. Say which of them is better, and why:\n\n 1. is it true?  2. is "
    "it CLEAR? Naïve \uff46\uff55\uff4c\uff4c words, don't count; 12345\tneither <sep> nor <mask> matter here. "
) * 2
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    INSTRUCTIONS,
    "any of various plants having leaves",
    "the act of doing something in a small building",
] * 3


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _bpe(**options: Any) -> Any:
    special = ["<unk>", "<bos>", "<eos>", "<sep>", "<pad>"]
    return trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, **options)


def _byte_level(**parts: Any) -> Tokenizer:
    return _trained(
        models.BPE(),
        _bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        **parts,
        decoder=decoders.ByteLevel(),
    )


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))


def roberta() -> Tokenizer:
    tokenizer = _byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


def llama3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]))


def gemma() -> Tokenizer:
    """Trained on words, so that no token goes on beyond a space; then used without cutting, as Gemma's is."""
    trained = _trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        _bpe(),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"),
    )
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return trained


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<bos>", "<eos>", "<sep>"],
        unk_token="<unk>",
        show_progress=False,
    )
    local = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return _trained(
        models.Unigram(),
        trainer,
        normalizer=local,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"),
    )


def bert() -> Tokenizer:
    special = ["[UNK]", "<bos>", "<eos>", "<sep>"]
    return _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


def beyond_spaces() -> Tokenizer:
    """Tokens of several words, as nothing cuts them."""
    return _trained(models.BPE(), _bpe(max_token_length=24), normalizer=normalizers.Replace(" ", "▁"))


def prepending() -> Tokenizer:
    """Llama-2's kind, which puts a space before every text."""
    trained = gemma()
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained


def greedy_token() -> Tokenizer:
    """An added token that takes the space behind a word."""
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("nor", rstrip=True)])
    return tokenizer


def looking_ahead() -> Tokenizer:
    """A pattern that cuts a word by what comes long after it."""
    tokenizer = llama3()
    split = pre_tokenizers.Split(Regex(r"[a-z](?=[^$]*END)|" + LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


SHARING = [gpt2, roberta, llama3, gemma, unigram, bert]
TOKENIZERS = {
    make.__name__: make for make in (*SHARING, beyond_spaces, prepending, greedy_token, looking_ahead)
}


def wrapped(name: str, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = TOKENIZERS[name]()
    first, last = (backend.token_to_id(token) for token in ("<bos>", "<eos>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", first), ("<eos>", last)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", **options)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: wrapped(name) for name in TOKENIZERS}


def shared(tokenizer: Any, max_length: int, add_special_tokens: bool = True) -> tuple[Any, list[int]]:
    """The one under test, and how many texts it gave to the plain tokenizer, call by call."""
    from ensemble.members.huggingface.scoring.shared_prefix import SharedPrefix

    given_plain: list[int] = []

    def plain(texts: Any) -> Any:
        given_plain.append(len(texts))
        return plainly(tokenizer, texts, max_length, add_special_tokens)

    return SharedPrefix(tokenizer, plain, max_length, add_special_tokens), given_plain


def plainly(tokenizer: Any, texts: Any, max_length: int, add_special_tokens: bool) -> tuple[Any, Any]:
    batch = tokenizer(
        list(texts), truncation=True, max_length=max_length, add_special_tokens=add_special_tokens
    )
    cut = [bool(encoding.overflowing) for encoding in batch.encodings]
    return {"input_ids": [np.array(ids, dtype=np.int64) for ids in batch["input_ids"]]}, np.array(cut)


def check(
    tokenizer: Any, texts: list[str], max_length: int = 4096, add_special_tokens: bool = True
) -> list[int]:
    prefix, given_plain = shared(tokenizer, max_length, add_special_tokens)
    found, found_cut = prefix.tokenize(texts)
    expected, expected_cut = plainly(tokenizer, texts, max_length, add_special_tokens)
    for row, (one, other) in enumerate(zip(found["input_ids"], expected["input_ids"], strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=repr(texts[row][-80:]))
    np.testing.assert_array_equal(found_cut, expected_cut)
    return given_plain


def rows(count: int) -> list[str]:
    words = INSTRUCTIONS.split()
    return [f"{INSTRUCTIONS}Text: {' '.join(words[number % 7 : number])}" for number in range(count)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_known_kinds_share_and_the_others_are_left_alone(name: str, tokenizers: dict[str, Any]) -> None:
    given_plain = check(tokenizers[name], rows(30))
    assert given_plain == ([3] if TOKENIZERS[name] in SHARING else [30])


@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    ends=st.lists(
        st.one_of(
            st.text(max_size=40),
            st.lists(
                st.sampled_from(
                    [
                        " ",
                        "  ",
                        "\n",
                        "a",
                        "the act",
                        "'s",
                        "12",
                        "<sep>",
                        "<mask>",
                        "nor ",
                        "\u0301",
                        "▁",
                        "\uff46",
                        " END",
                    ]
                ),
                max_size=12,
            ).map("".join),
        ),
        min_size=16,
        max_size=20,
    ),
    beginning=st.integers(150, len(INSTRUCTIONS)),
    max_length=st.sampled_from([8, 60, 120, 4096]),
    side=st.sampled_from(["left", "right"]),
    add_special_tokens=st.booleans(),
)
def test_ids_are_the_plain_tokenizers(
    tokenizers: dict[str, Any],
    name: str,
    ends: list[str],
    beginning: int,
    max_length: int,
    side: str,
    add_special_tokens: bool,
) -> None:
    tokenizer = tokenizers[name]
    tokenizer.truncation_side = side
    texts = [INSTRUCTIONS[:beginning] + end.encode("utf-8", "ignore").decode() for end in ends]
    try:
        check(tokenizer, texts, max_length, add_special_tokens)
    finally:
        tokenizer.truncation_side = "right"


def test_few_texts_and_short_beginnings_are_not_worth_it(tokenizers: dict[str, Any]) -> None:
    assert check(tokenizers["gpt2"], rows(15)) == [15]
    assert check(tokenizers["gpt2"], [text[-150:] for text in rows(30)]) == [30]


def test_a_tokenizer_that_is_not_what_it_seems_is_found_out() -> None:
    """Code around a known tokenizer that treats a text by its end."""
    from transformers import PreTrainedTokenizerFast

    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            if isinstance(text, list):
                text = [one.upper() if one.endswith("END") else one for one in text]
            return super().__call__(text, *args, **options)

    tokenizer = Shouting(tokenizer_object=TOKENIZERS["gpt2"](), bos_token="<bos>")
    texts = [text + " END" for text in rows(20)]
    prefix, given_plain = shared(tokenizer, 4096)
    for _ in range(2):
        found, _ = prefix.tokenize(texts)
        expected, _ = plainly(tokenizer, texts, 4096, True)
        assert [ids.tolist() for ids in found["input_ids"]] == [ids.tolist() for ids in expected["input_ids"]]
    assert given_plain == [3, 20, 20]
