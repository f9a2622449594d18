"""Rows of the table -> token ids: templates, pairs, truncation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.data.json_cells import TemplateProblem, replace_lone_surrogates
from ensemble.data.template import compile_template
from ensemble.members.huggingface.spec import ModelSpec

# Rows that the tokenizer gets at a time: enough for all of its threads, a moment's work for the slowest.
BLOCK_ROWS = 512
Text: TypeAlias = str | tuple[str, str]
_NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Encoded:
    """Token ids of some rows.

    ``inputs[name][i]`` is row i's array for the model's input ``name`` (``input_ids``, perhaps
    ``token_type_ids``), int64 [tokens]; ``lengths`` is int64 [rows].
    ``problems[i]`` says why row i has none and is of length 0; every other row has at least one.
    ``first[i]`` is the first row whose ids are row i's, int64 [rows]; None where no two rows share theirs.
    """

    inputs: dict[str, list[npt.NDArray[np.int64]]]
    lengths: npt.NDArray[np.int64]
    truncated_rows: int
    problems: dict[int, str] = field(default_factory=dict)
    first: npt.NDArray[np.int64] | None = None


class Prompt:
    """Renders and tokenizes rows as a member's settings say.

    Args:
        tokenizer: a transformers tokenizer; its truncation side is already set.
        max_length: tokens a row may have, special tokens included.
    """

    def __init__(self, spec: ModelSpec, tokenizer: Any, max_length: int) -> None:
        self._template = compile_template(spec.prompt_template) if spec.prompt_template is not None else None
        self._spec, self._tokenizer, self._max_length = spec, tokenizer, max_length
        # What an empty row consists of where the tokenizer adds nothing of its own: a model needs one token.
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
        self._lone_token = next(token for token in ids if token is not None)

    def render(self, row: Mapping[str, object]) -> Text:
        """The text of one row, or the two texts of a pair."""
        if self._template is not None:
            return self._template.render(row)
        values = (row[column] for column in self._spec.text_columns)
        texts = ["" if value is None else replace_lone_surrogates(str(value)) for value in values]
        return texts[0] if len(texts) == 1 else (texts[0], texts[1])

    def encode(
        self, rows: Sequence[Mapping[str, object]], step: Callable[[], None] = lambda: None
    ) -> Encoded:
        """Token ids of the rows, cut to ``max_length``; rows that the template fails on get none.

        ``step`` is called after each block of rows.
        """
        inputs: dict[str, list[npt.NDArray[np.int64]]] = {}
        lengths = np.zeros(len(rows), dtype=np.int64)
        truncated = np.zeros(len(rows), dtype=np.bool_)
        problems: dict[int, str] = {}
        first = np.arange(len(rows))
        row_of_text: dict[Text, int] = {}
        for start in range(0, len(rows), BLOCK_ROWS):
            texts: dict[int, Text] = {}
            for row in range(start, min(start + BLOCK_ROWS, len(rows))):
                try:
                    text = self.render(rows[row])
                except TemplateProblem as error:
                    problems[row] = f"prompt_template: {error}"
                    continue
                first[row] = row_of_text.setdefault(text, row)
                if first[row] == row:
                    texts[row] = text
            if texts:
                chosen = list(texts)
                arrays_of, lengths[chosen], truncated[chosen] = self._tokenize(list(texts.values()))
                for name, arrays in arrays_of.items():
                    of_rows = inputs.setdefault(name, [_NO_TOKENS] * len(rows))
                    for row, array in zip(chosen, arrays, strict=True):
                        of_rows[row] = array
            step()
        # Different texts can have the same ids: in what the tokenizer leaves out or cuts.
        same_ids = first.copy()
        row_of_ids: dict[bytes, int] = {}
        for row in np.flatnonzero((first == np.arange(len(rows))) & (lengths > 0)).tolist():
            ids = b"".join(of_rows[row].tobytes() for of_rows in inputs.values())
            same_ids[row] = row_of_ids.setdefault(ids, row)
        for of_rows in inputs.values():
            of_rows[:] = [of_rows[row] for row in first.tolist()]
        return Encoded(inputs, lengths[first], int(truncated[first].sum()), problems, same_ids[first])

    def encode_texts(self, texts: Sequence[Text]) -> Encoded:
        """Token ids of texts, or of pairs where the member reads two columns."""
        inputs, lengths, truncated = self._tokenize(texts)
        return Encoded(inputs, lengths, int(truncated.sum()))

    def _tokenize(
        self, texts: Sequence[Text]
    ) -> tuple[dict[str, list[npt.NDArray[np.int64]]], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Inputs, lengths, and which texts were cut."""
        is_pair = len(self._spec.text_columns) == 2
        batch = self._tokenizer(
            [text[0] for text in texts] if is_pair else list(texts),
            [text[1] for text in texts] if is_pair else None,
            add_special_tokens=self._spec.add_special_tokens,
            truncation=True,
            max_length=self._max_length,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        names = [name for name in ("input_ids", "token_type_ids") if name in batch]
        inputs = {name: [np.asarray(ids, dtype=np.int64) for ids in batch[name]] for name in names}
        if batch.encodings is not None:
            truncated = [bool(encoding.overflowing) for encoding in batch.encodings]
        else:  # tokenizers written in Python do not say; a row of exactly max_length tokens counts as cut
            truncated = [len(ids) >= self._max_length for ids in inputs["input_ids"]]
        for index, ids in enumerate(inputs["input_ids"]):
            if len(ids) == 0:
                for name, arrays in inputs.items():
                    arrays[index] = np.array([self._lone_token if name == "input_ids" else 0], dtype=np.int64)
        lengths = np.fromiter((len(ids) for ids in inputs["input_ids"]), dtype=np.int64, count=len(texts))
        return inputs, lengths, np.array(truncated, dtype=np.bool_)
