"""Rows of the table -> token ids: templates, pairs, truncation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.data.json_cells import TemplateProblem, replace_lone_surrogates
from ensemble.data.template import compile_template
from ensemble.members.huggingface.scoring.truncation import Arrays, FieldTruncation
from ensemble.members.huggingface.spec import ModelSpec

# Rows that the tokenizer gets at a time: enough for all of its threads, and little work for the slowest one.
BLOCK_ROWS = 512
Inputs: TypeAlias = dict[str, list[npt.NDArray[np.int64]]]
Text: TypeAlias = str | tuple[str, str]
_NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Encoded:
    """Token ids of some rows.

    ``inputs[name][i]`` is row i's array for the model's input ``name`` (``input_ids``, perhaps
    ``token_type_ids``), int64 [tokens]; ``lengths`` is int64 [rows].
    ``truncated_rows`` is the number of rows that were cut, and ``cut_tokens`` how many tokens they lost.
    ``problems[i]`` says why row i has no tokens and the length 0; every other row has at least one token.
    ``first[i]`` is the first row with the same ids as row i, int64 [rows]; None if all rows differ.
    """

    inputs: dict[str, list[npt.NDArray[np.int64]]]
    lengths: npt.NDArray[np.int64]
    truncated_rows: int
    cut_tokens: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    first: npt.NDArray[np.int64] | None = None


class Prompt:
    """Render and tokenize rows by a member's settings.

    Args:
        tokenizer: a transformers tokenizer; its truncation side is already set.
        max_length: tokens a row may have, special tokens included.

    Raises:
        ValueError: truncation by field does not work with this tokenizer, or leaves no room.
    """

    def __init__(self, spec: ModelSpec, tokenizer: Any, max_length: int) -> None:
        self._template = compile_template(spec.prompt_template) if spec.prompt_template is not None else None
        self._spec = spec
        self._tokenizer = tokenizer
        self._max_length = max_length
        # The token of an empty row if the tokenizer adds no special ones: a model needs one token.
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
        self._lone_token = next(token for token in ids if token is not None)
        self._truncation: FieldTruncation | None = None
        if spec.truncation is not None and self._template is not None:
            self._truncation = FieldTruncation(
                spec.truncation, self._template, tokenizer, max_length, self._tokenize_whole
            )

    def fixed_tokens(self) -> int:
        """Return the tokens of the template's own text, which is in every prompt; 0 without a template."""
        if self._template is None:
            return 0
        return len(self._tokenize_whole(["".join(self._template.fixed_texts)])[0]["input_ids"])

    @property
    def is_pair(self) -> bool:
        """Return whether a row is a pair of texts."""
        return len(self._spec.text_columns) == 2

    def whole(self, text: str) -> str:
        """Return the whole text for the tokenizer, given a row's text."""
        return text

    def render(self, row: Mapping[str, object]) -> Text:
        """Return the text of a row, or the two texts of a pair."""
        if self._template is not None:
            return self._template.render(row)
        values = (row[column] for column in self._spec.text_columns)
        texts = ["" if value is None else replace_lone_surrogates(str(value)) for value in values]
        return texts[0] if len(texts) == 1 else (texts[0], texts[1])

    def encode(
        self, rows: Sequence[Mapping[str, object]], step: Callable[[], None] = lambda: None
    ) -> Encoded:
        """Return token ids of the rows, cut to ``max_length``; none for rows on which the template fails.

        Args:
            step: called after each block of rows.
        """
        inputs: dict[str, list[npt.NDArray[np.int64]]] = {}
        lengths = np.zeros(len(rows), dtype=np.int64)
        # Tokens that were cut off; -1 where nothing was cut.
        cut = np.full(len(rows), -1, dtype=np.int64)
        problems: dict[int, str] = {}
        first = np.arange(len(rows))
        row_of_text: dict[tuple[Text, ...], int] = {}
        for start in range(0, len(rows), BLOCK_ROWS):
            texts: dict[int, Text] = {}
            for row in range(start, min(start + BLOCK_ROWS, len(rows))):
                try:
                    text = self.render(rows[row])
                except TemplateProblem as error:
                    problems[row] = f"prompt_template: {error}"
                    continue
                # How a prompt is cut depends on the columns that its text comes from.
                fields = self._truncation.columns if self._truncation is not None else ()
                key = (text, *(str(rows[row][column]) for column in fields))
                first[row] = row_of_text.setdefault(key, row)
                if first[row] == row:
                    texts[row] = text
            if self._truncation is not None and texts:
                problems |= self._encode_fields(self._truncation, rows, texts, inputs, lengths, cut)
            elif texts:
                numbers = list(texts)
                block, lengths[numbers], cut[numbers], _ = self._tokenize(list(texts.values()))
                for name, arrays in block.items():
                    row_arrays = inputs.setdefault(name, [_NO_TOKENS] * len(rows))
                    for row, array in zip(numbers, arrays, strict=True):
                        row_arrays[row] = array
            step()
        # Different texts can have the same ids, if they differ where the tokenizer ignores or cuts them.
        same_ids = first.copy()
        row_of_ids: dict[bytes, int] = {}
        for row in np.flatnonzero((first == np.arange(len(rows))) & (lengths > 0)).tolist():
            ids = b"".join(arrays[row].tobytes() for arrays in inputs.values())
            same_ids[row] = row_of_ids.setdefault(ids, row)
        for name, arrays in inputs.items():
            inputs[name] = [arrays[row] for row in first.tolist()]
        for row in np.flatnonzero(first != np.arange(len(rows))).tolist():
            if first[row] in problems:
                problems[row] = problems[int(first[row])]
        cut = cut[first]
        return Encoded(
            inputs=inputs,
            lengths=lengths[first],
            truncated_rows=int((cut >= 0).sum()),
            cut_tokens=int(cut[cut > 0].sum()),
            problems=dict(sorted(problems.items())),
            first=same_ids[first],
        )

    def _encode_fields(
        self,
        truncation: FieldTruncation,
        rows: Sequence[Mapping[str, object]],
        texts: Mapping[int, Text],
        inputs: dict[str, list[npt.NDArray[np.int64]]],
        lengths: npt.NDArray[np.int64],
        cut: npt.NDArray[np.int64],
    ) -> dict[int, str]:
        """Write a block's token ids into ``inputs``, ``lengths`` and ``cut``; return why some rows have none."""
        uncut, _, _, uncut_encodings = self._tokenize(list(texts.values()), is_cut=False)
        whole = dict(zip(texts, _by_text(uncut), strict=True))
        encodings = dict(zip(texts, uncut_encodings or (), strict=True))
        sizes = {row: len(arrays["input_ids"]) for row, arrays in whole.items()}
        too_long = {row: size for row, size in sizes.items() if size > self._max_length}
        fitted, problems = truncation.fit(
            {row: rows[row] for row in too_long},
            too_long,
            {row: (self.whole(str(texts[row])), encodings[row]) for row in too_long},
        )
        for row, arrays in whole.items():
            if row in problems:
                continue
            for name, ids in fitted.get(row, arrays).items():
                inputs.setdefault(name, [_NO_TOKENS] * len(rows))[row] = ids
            lengths[row] = inputs["input_ids"][row].size
            if row in too_long:
                cut[row] = sizes[row] - lengths[row]
        return problems

    def _tokenize_whole(self, texts: Sequence[str]) -> list[Arrays]:
        """Return the inputs of each text, uncut."""
        return _by_text(self._tokenize(texts, is_cut=False)[0])

    def encode_texts(self, texts: Sequence[Text]) -> Encoded:
        """Return token ids of texts, or of pairs if the member reads two columns."""
        inputs, lengths, cut, _ = self._tokenize(texts)
        return Encoded(inputs, lengths, int((cut >= 0).sum()), int(cut[cut > 0].sum()))

    def _tokenize(
        self, texts: Sequence[Text], is_cut: bool = True
    ) -> tuple[Inputs, npt.NDArray[np.int64], npt.NDArray[np.int64], Sequence[Any] | None]:
        """Return inputs, lengths, how many tokens each text lost (-1 if it is whole), and encodings if any."""
        batch = self._call(texts, is_cut)
        is_pair = self.is_pair
        names = [name for name in ("input_ids", "token_type_ids") if name in batch]
        inputs = {name: [np.asarray(ids, dtype=np.int64) for ids in batch[name]] for name in names}
        cut = np.full(len(texts), -1, dtype=np.int64)
        if not is_cut:
            shortened = []
        elif batch.encodings is not None:
            shortened = [index for index, encoding in enumerate(batch.encodings) if encoding.overflowing]
        else:  # tokenizers written in Python do not say; a row of exactly max_length tokens counts as cut
            shortened = [
                index for index, ids in enumerate(inputs["input_ids"]) if len(ids) >= self._max_length
            ]
        if shortened and batch.encodings is not None and not is_pair:
            # The tokens that were cut off come in pieces, each with special tokens of its own.
            added = self._tokenizer.num_special_tokens_to_add(False) if self._spec.add_special_tokens else 0
            for index in shortened:
                cut[index] = sum(len(piece) - added for piece in batch.encodings[index].overflowing)
        elif shortened:
            whole = self._call([texts[index] for index in shortened], is_cut=False)["input_ids"]
            cut[shortened] = [
                len(ids) - len(inputs["input_ids"][index])
                for index, ids in zip(shortened, whole, strict=True)
            ]
        for index, ids in enumerate(inputs["input_ids"]):
            if len(ids) == 0:
                for name, arrays in inputs.items():
                    arrays[index] = np.array([self._lone_token if name == "input_ids" else 0], dtype=np.int64)
        lengths = np.fromiter((len(ids) for ids in inputs["input_ids"]), dtype=np.int64, count=len(texts))
        return inputs, lengths, cut, batch.encodings

    def _call(self, texts: Sequence[Text], is_cut: bool) -> Any:
        seconds: list[str] | None = None
        if self.is_pair:
            firsts = [text[0] for text in texts]
            seconds = [text[1] for text in texts]
        else:
            firsts = [self.whole(str(text)) for text in texts]
        return self._tokenizer(
            firsts,
            seconds,
            add_special_tokens=self._spec.add_special_tokens,
            truncation=is_cut,
            max_length=self._max_length if is_cut else None,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )


def _by_text(inputs: Inputs) -> list[Arrays]:
    return [dict(zip(inputs, arrays, strict=True)) for arrays in zip(*inputs.values(), strict=True)]
