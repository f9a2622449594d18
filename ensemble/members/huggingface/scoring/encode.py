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

# Rows that the tokenizer gets at a time: enough for all of its threads, a moment's work for the slowest.
BLOCK_ROWS = 512
Inputs: TypeAlias = dict[str, list[npt.NDArray[np.int64]]]
Text: TypeAlias = str | tuple[str, str]
_NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Encoded:
    """Token ids of some rows.

    ``inputs[name][i]`` is row i's array for the model's input ``name`` (``input_ids``, perhaps
    ``token_type_ids``), int64 [tokens]; ``lengths`` is int64 [rows].
    ``truncated_rows`` are those that were cut, and ``cut_tokens`` how many tokens fewer they have.
    ``problems[i]`` says why row i has none and is of length 0; every other row has at least one.
    ``first[i]`` is the first row whose ids are row i's, int64 [rows]; None where no two rows share theirs.
    """

    inputs: dict[str, list[npt.NDArray[np.int64]]]
    lengths: npt.NDArray[np.int64]
    truncated_rows: int
    cut_tokens: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    first: npt.NDArray[np.int64] | None = None


class Prompt:
    """Renders and tokenizes rows as a member's settings say.

    Args:
        tokenizer: a transformers tokenizer; its truncation side is already set.
        max_length: tokens a row may have, special tokens included.

    Raises:
        ValueError: truncation by field cannot be had of this tokenizer, or leaves no room.
    """

    def __init__(self, spec: ModelSpec, tokenizer: Any, max_length: int) -> None:
        self._template = compile_template(spec.prompt_template) if spec.prompt_template is not None else None
        self._spec, self._tokenizer, self._max_length = spec, tokenizer, max_length
        # What an empty row consists of where the tokenizer adds nothing of its own: a model needs one token.
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
        self._lone_token = next(token for token in ids if token is not None)
        self._truncation: FieldTruncation | None = None
        if spec.truncation is not None and self._template is not None:
            self._truncation = FieldTruncation(
                spec.truncation, self._template, tokenizer, max_length, self._tokenize_whole
            )

    def fixed_tokens(self) -> int:
        """Tokens of what stands in every prompt, whatever the row; 0 where there is no template."""
        if self._template is None:
            return 0
        return len(self._tokenize_whole(["".join(self._template.fixed_texts)])[0]["input_ids"])

    @property
    def is_pair(self) -> bool:
        """Whether a row's text is two texts."""
        return len(self._spec.text_columns) == 2

    def whole(self, text: str) -> str:
        """What the tokenizer gets of a row's text."""
        return text

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
                # What is cut of a prompt depends on which column has what of it.
                fields = self._truncation.columns if self._truncation is not None else ()
                key = (text, *(str(rows[row][column]) for column in fields))
                first[row] = row_of_text.setdefault(key, row)
                if first[row] == row:
                    texts[row] = text
            if self._truncation is not None and texts:
                unfit = self._encode_fields(self._truncation, rows, texts, inputs, lengths, cut)
                problems |= unfit
            elif texts:
                chosen = list(texts)
                arrays_of, lengths[chosen], cut[chosen], _ = self._tokenize(list(texts.values()))
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
        for row in np.flatnonzero(first != np.arange(len(rows))).tolist():
            if first[row] in problems:
                problems[row] = problems[int(first[row])]
        of_all = cut[first]
        return Encoded(
            inputs,
            lengths[first],
            int((of_all >= 0).sum()),
            int(of_all[of_all > 0].sum()),
            dict(sorted(problems.items())),
            same_ids[first],
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
        """Puts the token ids of a block's texts where they belong; why some rows have none."""
        found = self._tokenize([*texts.values()], is_cut=False)
        whole = dict(zip(texts, _by_text(found[0]), strict=True))
        encodings = dict(zip(texts, found[3] or (), strict=True))
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
        """The inputs of each text, uncut."""
        return _by_text(self._tokenize(texts, is_cut=False)[0])

    def encode_texts(self, texts: Sequence[Text]) -> Encoded:
        """Token ids of texts, or of pairs where the member reads two columns."""
        inputs, lengths, cut, _ = self._tokenize(texts)
        return Encoded(inputs, lengths, int((cut >= 0).sum()), int(cut[cut > 0].sum()))

    def _tokenize(
        self, texts: Sequence[Text], is_cut: bool = True
    ) -> tuple[Inputs, npt.NDArray[np.int64], npt.NDArray[np.int64], Sequence[Any] | None]:
        """Inputs, lengths, how many tokens each text lost (-1 where it is whole), and encodings if any."""
        batch = self._call(texts, is_cut)
        is_pair = self.is_pair
        names = [name for name in ("input_ids", "token_type_ids") if name in batch]
        inputs = {name: [np.asarray(ids, dtype=np.int64) for ids in batch[name]] for name in names}
        cut = np.full(len(texts), -1, dtype=np.int64)
        if not is_cut:
            shortened = []
        elif batch.encodings is not None:
            shortened = [index for index, one in enumerate(batch.encodings) if one.overflowing]
        else:  # tokenizers written in Python do not say; a row of exactly max_length tokens counts as cut
            shortened = [
                index for index, ids in enumerate(inputs["input_ids"]) if len(ids) >= self._max_length
            ]
        if shortened and batch.encodings is not None and not is_pair:
            # What was cut off comes in pieces, each with special tokens of its own.
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
        is_pair = self.is_pair
        return self._tokenizer(
            [text[0] for text in texts] if is_pair else [self.whole(str(text)) for text in texts],
            [text[1] for text in texts] if is_pair else None,
            add_special_tokens=self._spec.add_special_tokens,
            truncation=is_cut,
            max_length=self._max_length if is_cut else None,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )


def _by_text(inputs: Inputs) -> list[Arrays]:
    return [dict(zip(inputs, arrays, strict=True)) for arrays in zip(*inputs.values(), strict=True)]
