"""Rows of the table -> token ids: templates, pairs, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.protocol import WorkerSpec
from ensemble.template import TemplateProblem, compile_template, replace_lone_surrogates


@dataclass(frozen=True)
class Encoded:
    """Token ids of some rows.

    ``inputs[name][i]`` is row i's array for the model's input ``name`` (``input_ids``, perhaps
    ``token_type_ids``), int64 [tokens]; ``lengths`` is int64 [rows].
    """

    inputs: dict[str, list[npt.NDArray[np.int64]]]
    lengths: npt.NDArray[np.int64]
    truncated_rows: int


class RowError(ValueError):
    """A row that cannot be rendered; ``row`` is its place among those given."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class Prompt:
    """Renders and tokenizes rows as a member's settings say.

    Args:
        tokenizer: a transformers tokenizer; its truncation side is already set.
        max_length: tokens a row may have, special tokens included.
    """

    def __init__(self, spec: WorkerSpec, tokenizer: Any, max_length: int) -> None:
        self._template = compile_template(spec.prompt_template) if spec.prompt_template is not None else None
        self._columns = spec.text_columns
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._add_special_tokens = spec.add_special_tokens
        # What an empty row consists of where the tokenizer adds nothing of its own: a model needs one token.
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
        self._lone_token = next(token for token in ids if token is not None)

    def render(self, row: Mapping[str, object]) -> str | tuple[str, str]:
        """The text of one row, or the two texts of a pair."""
        if self._template is not None:
            return self._template.render(row)
        texts = tuple(_text(row[column]) for column in self._columns)
        return texts[0] if len(texts) == 1 else (texts[0], texts[1])

    def encode(self, rows: Sequence[Mapping[str, object]]) -> Encoded:
        """Token ids of the rows, cut to ``max_length``.

        Raises:
            RowError: the template fails on a row.
        """
        texts: list[str | tuple[str, str]] = []
        for index, row in enumerate(rows):
            try:
                texts.append(self.render(row))
            except TemplateProblem as error:
                raise RowError(index, str(error)) from error
        return self.encode_texts(texts)

    def encode_texts(self, texts: Sequence[str | tuple[str, str]]) -> Encoded:
        """Token ids of texts, or of pairs where the member reads two columns."""
        pairs = len(self._columns) == 2
        batch = self._tokenizer(
            [text[0] for text in texts] if pairs else texts,
            [text[1] for text in texts] if pairs else None,
            add_special_tokens=self._add_special_tokens,
            truncation=True,
            max_length=self._max_length,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        inputs = {
            name: [np.asarray(ids, dtype=np.int64) for ids in batch[name]]
            for name in batch
            if name in ("input_ids", "token_type_ids")
        }
        self._fill_empty(inputs)
        lengths = np.fromiter((len(ids) for ids in inputs["input_ids"]), dtype=np.int64, count=len(texts))
        return Encoded(inputs, lengths, _count_truncated(batch, lengths, self._max_length))

    def _fill_empty(self, inputs: dict[str, list[npt.NDArray[np.int64]]]) -> None:
        for index, ids in enumerate(inputs["input_ids"]):
            if len(ids) == 0:
                for name, arrays in inputs.items():
                    arrays[index] = np.array([self._lone_token if name == "input_ids" else 0], dtype=np.int64)


def _count_truncated(batch: Any, lengths: npt.NDArray[np.int64], max_length: int) -> int:
    if batch.encodings is not None:
        return sum(bool(encoding.overflowing) for encoding in batch.encodings)
    # Tokenizers written in Python do not say; a row of exactly max_length tokens counts as cut.
    return int((lengths >= max_length).sum())


def _text(value: object) -> str:
    return "" if value is None else replace_lone_surrogates(str(value))
