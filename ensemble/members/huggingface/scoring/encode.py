"""Turn rows of the table into token ids: templates, pairs, truncation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.data.json_cells import TemplateProblem, replace_lone_surrogates
from ensemble.data.template import compile_template
from ensemble.members.huggingface.scoring.truncation import Arrays, FieldCuts
from ensemble.members.huggingface.spec import ModelSpec

# Rows that the tokenizer gets at a time: enough for all of its threads, and little work for the slowest one.
BLOCK_ROWS = 512
Text: TypeAlias = str | tuple[str, str]
_NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Encoded:
    """Hold the token ids of some rows.

    Attributes:
        inputs: ``inputs[name][i]`` is row i's array for the model's input ``name`` (``input_ids``, perhaps
            ``token_type_ids``), int64 [tokens].
        lengths: int64 [rows].
        truncated_rows: rows that were cut, which lost ``cut_tokens``.
        problems: why a row has no tokens and the length 0; every other row has at least one token.
        first: the first row with the same ids as each row, int64 [rows]; None if all rows differ.
        groups: ascending numbers, int64 [rows]; rows of a number stand for one row of the table, and may begin
            alike. None: each stands for a row of its own.
    """

    inputs: dict[str, list[npt.NDArray[np.int64]]]
    lengths: npt.NDArray[np.int64]
    truncated_rows: int
    cut_tokens: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    first: npt.NDArray[np.int64] | None = None
    groups: npt.NDArray[np.int64] | None = None


class Prompt:
    """Render and tokenize rows by a member's settings."""

    def __init__(self, spec: ModelSpec, tokenizer: Any, max_length: int) -> None:
        self._template = compile_template(spec.prompt_template) if spec.prompt_template is not None else None
        self._spec = spec
        self._tokenizer = tokenizer
        self._max_length = max_length
        self.is_pair = len(spec.text_columns) == 2
        # The token of an empty row if the tokenizer adds no special ones: a model needs one token.
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
        self._lone_token = next(token for token in ids if token is not None)
        self._truncation: FieldCuts | None = None
        if spec.truncation is not None and self._template is not None:
            self._truncation = FieldCuts(
                spec.truncation,
                self._template,
                tokenizer,
                max_length,
                lambda text: self._tokenize([text])[0][0],
            )

    def fixed_tokens(self) -> int:
        """Return the tokens of the template's own text, which is in every prompt; 0 without a template."""
        if self._template is None:
            return 0
        return len(self._tokenize(["".join(self._template.fixed_texts)])[0][0]["input_ids"])

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
        self, rows: Sequence[Mapping[str, object]], step: Callable[[], object] = lambda: None
    ) -> Encoded:
        """Return token ids of the rows, cut to ``max_length``; ``step`` is called after each block of rows."""
        arrays: list[Arrays] = [{} for _ in rows]
        lost: list[int] = []  # tokens of each row that was cut
        problems: dict[int, str] = {}
        for start in range(0, len(rows), BLOCK_ROWS):
            texts: dict[int, Text] = {}
            for row in range(start, min(start + BLOCK_ROWS, len(rows))):
                try:
                    texts[row] = self.render(rows[row])
                except TemplateProblem as error:
                    problems[row] = f"prompt_template: {error}"
            tokenized = self._tokenize(list(texts.values()))
            for (row, text), (inputs, encoding) in zip(texts.items(), tokenized, strict=True):
                length = len(inputs["input_ids"])
                try:
                    if length <= self._max_length:
                        arrays[row] = inputs
                        continue
                    if self._truncation is None:
                        arrays[row] = self._shorten(text, inputs, encoding)
                    else:
                        arrays[row] = self._truncation.fit(rows[row], length)
                    lost.append(length - len(arrays[row]["input_ids"]))
                except TemplateProblem as error:
                    problems[row] = str(error)
            step()
        row_of_ids: dict[bytes, int] = {}
        first = np.arange(len(rows))
        for row, inputs in enumerate(arrays):
            if inputs:
                ids = b"".join(values.tobytes() for values in inputs.values())
                first[row] = row_of_ids.setdefault(ids, row)
        return Encoded(
            *_by_name(arrays),
            truncated_rows=len(lost),
            cut_tokens=sum(lost),
            problems=dict(sorted(problems.items())),
            first=first,
        )

    def encode_texts(self, texts: Sequence[Text]) -> Encoded:
        """Return token ids of texts, or of pairs if the member reads two columns."""
        arrays = [
            inputs if len(inputs["input_ids"]) <= self._max_length else self._shorten(text, inputs, encoding)
            for text, (inputs, encoding) in zip(texts, self._tokenize(texts), strict=True)
        ]
        return Encoded(*_by_name(arrays), truncated_rows=0)

    def _shorten(self, text: Text, inputs: Arrays, encoding: Any) -> Arrays:
        """Return the inputs of a text that is too long, cut to ``max_length``, given its uncut inputs."""
        return self._tokenize([text], is_cut=True)[0][0]

    def _tokenize(self, texts: Sequence[Text], is_cut: bool = False) -> list[tuple[Arrays, Any]]:
        """Return each text's inputs, and its encoding by a fast tokenizer; None by others."""
        if not texts:
            return []
        seconds = [text[1] for text in texts] if self.is_pair else None
        batch = self._tokenizer(
            [text[0] if self.is_pair else self.whole(str(text)) for text in texts],
            seconds,
            add_special_tokens=self._spec.add_special_tokens,
            truncation=is_cut,
            max_length=self._max_length if is_cut else None,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        names = [name for name in ("input_ids", "token_type_ids") if name in batch]
        arrays = []
        for index in range(len(texts)):
            inputs = {name: np.asarray(batch[name][index], dtype=np.int64) for name in names}
            if not len(inputs["input_ids"]):
                inputs = {name: np.array([self._lone_token if name == "input_ids" else 0]) for name in names}
            arrays.append(inputs)
        return list(zip(arrays, batch.encodings or [None] * len(texts), strict=True))


def _by_name(
    arrays: Sequence[Arrays],
) -> tuple[dict[str, list[npt.NDArray[np.int64]]], npt.NDArray[np.int64]]:
    """Return rows' arrays by name, and their lengths."""
    names = dict.fromkeys(name for values in arrays for name in values)
    inputs = {name: [values.get(name, _NO_TOKENS) for values in arrays] for name in names}
    lengths = [len(values.get("input_ids", _NO_TOKENS)) for values in arrays]
    return inputs, np.array(lengths, dtype=np.int64)
