"""Run language models that are scored at label tokens: prompts, the labels' tokens, and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ensemble.common.protocol import Counters
from ensemble.data.json_cells import parse_json_cell, replace_lone_surrogates
from ensemble.members.causal_lm.scoring import EncodedChoices, LabelScorer, LabelTexts
from ensemble.members.huggingface.loading.load import Loaded
from ensemble.members.huggingface.loading.tokenizer import label_ids
from ensemble.members.huggingface.scoring.classifier import probabilities
from ensemble.members.huggingface.scoring.encode import Encoded, Prompt, Text
from ensemble.members.huggingface.scoring.member import TextMember
from ensemble.members.huggingface.scoring.truncation import Arrays
from ensemble.members.huggingface.spec import CheckpointSpec, ModelSpec, too_much_text
from ensemble.members.label_tokens import CHOICE_POSITIONS, token_problems

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# A placeholder for a message, which templates leave unchanged.
_MARK = "MESSAGE7f3a"
# Texts for the first passes of a model whose labels are each row's choices.
_CHOICES_OF_WARMUP: tuple[str, ...] = (" one two three", " four five six")
# Choices whose tokens are kept, as many rows may have the same ones; and prompts that leave them more room.
_KEPT_CHOICES, _KEPT_PROMPTS = 1 << 16, 64


@dataclass(frozen=True, kw_only=True)
class CausalSpec(ModelSpec):
    """Add the keys of ``CausalSettings`` to those of a text model."""

    label_tokens: dict[str, str]
    choices: str | None
    single_token: bool
    length_normalize: str
    apply_chat_template: bool
    system_instruction: str | None


class CausalMember(TextMember[CausalSpec]):
    """Predict with a language model that is scored at the tokens of each label's text."""

    Spec: ClassVar[type[CheckpointSpec]] = CausalSpec

    @cached_property
    def _label_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of the labels' texts; with choices, of texts for first passes."""
        spec = self._spec
        if spec.choices is not None:
            return tuple(label_ids(self._token_ids, text) for text in _CHOICES_OF_WARMUP)
        ids = {label: label_ids(self._token_ids, spec.label_tokens[label]) for label in spec.labels}
        problems = list(token_problems(ids, self._special_tokens, spec.single_token))
        if problems:
            raise ValueError("; ".join(problems))
        return tuple(ids.values())

    def label_ids(self, encoded: Encoded, row: int) -> Sequence[tuple[int, ...]]:
        """Return the tokens of each label of a row that ``encode`` has encoded."""
        texts = encoded.texts[row] if isinstance(encoded, EncodedChoices) else None
        return self._label_ids if texts is None else texts.ids

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        names = {getattr(self._tokenizer, f"{name}_id"): name for name in reversed(_SPECIAL)}
        names.pop(None, None)
        return names

    def _encode(self, rows: Sequence[Mapping[str, object]], step: Callable[[], object]) -> Encoded:
        encoded = super()._encode(rows, step)
        if self._spec.choices is None:
            return encoded
        texts: list[LabelTexts | None] = [None] * len(rows)
        problems = dict(encoded.problems)
        shorter: dict[int, Encoded] = {}
        for number, row in enumerate(rows):
            try:
                if number not in problems:
                    texts[number] = of_row = self._texts_of_choices(row[self._spec.choices])
                    # The model reads all tokens of a choice but its last after the prompt.
                    room = self._max_length - max(map(len, of_row.ids)) + 1
                    if encoded.lengths[number] > room:
                        shorter[number] = self._shorter(row, room)
            except ValueError as error:
                problems[number] = str(error)
        inputs = {name: list(arrays) for name, arrays in encoded.inputs.items()}
        lengths = encoded.lengths.copy()
        for number, prompt in shorter.items():
            lengths[number] = prompt.lengths[0]
            for name, (array,) in prompt.inputs.items():
                inputs[name][number] = array
        lengths[list(problems)] = 0
        number_of_row: dict[object, int] = {}
        first = np.arange(len(rows))
        for number, array in enumerate(inputs.get("input_ids", [])):
            if number not in problems:
                first[number] = number_of_row.setdefault((array.tobytes(), texts[number]), number)
        return EncodedChoices(
            inputs=inputs,
            lengths=lengths,
            truncated_rows=encoded.truncated_rows
            + sum(int(encoded.lengths[number] < self._max_length) for number in shorter),
            cut_tokens=encoded.cut_tokens + int((encoded.lengths - lengths)[list(shorter)].sum()),
            problems=dict(sorted(problems.items())),
            first=first,
            texts=texts,
        )

    def _shorter(self, row: Mapping[str, object], tokens: int) -> Encoded:
        """Return a row's prompt of at most so many tokens; raises ValueError if it has none."""
        if tokens <= 0:
            raise ValueError(
                f"choices: the longest text leaves no room for a prompt within max_length {self._max_length}"
            )
        encoded = self._prompt_of(self._job, tokens).encode([row])
        if encoded.problems:
            raise ValueError(encoded.problems[0])
        return encoded

    def _texts_of_choices(self, cell: object) -> LabelTexts:
        """Return the tokens of a row's choices; raises ValueError for what the parent has refused, too."""
        choices = parse_json_cell(cell)
        most = len(self._spec.labels)
        if not isinstance(choices, list) or not 2 <= len(choices) <= most:
            raise ValueError(f"choices: must be a list of 2 to {most} texts")
        choice_texts = [replace_lone_surrogates(str(text)) for text in choices]
        ids = tuple(self._choice_ids(text) for text in choice_texts)
        for number, tokens in enumerate(ids):
            problem = next(token_problems({str(number): tokens}, self._special_tokens, False), None)
            if problem is not None:
                raise ValueError(f"choices.{problem.removeprefix('label_tokens.')}")
        return LabelTexts(ids, self._divisors(ids, choice_texts))

    @cached_property
    def _choice_ids(self) -> Callable[[str], tuple[int, ...]]:
        return lru_cache(maxsize=_KEPT_CHOICES)(lambda text: label_ids(self._token_ids, text))

    @cached_property
    def _prompt_of(self) -> Callable[[int, int], Prompt]:
        """Return a job's prompt of fewer tokens than those of most rows, given their number."""
        return lru_cache(maxsize=_KEPT_PROMPTS)(
            lambda job, tokens: self._new_prompt(self._job_specs()[job], tokens)
        )

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _make_prompt(self, spec: CausalSpec) -> Prompt:
        # The model reads all tokens of a label but its last after the prompt; choices differ from row to row.
        label_length = 1 if spec.choices is not None else max(map(len, self._label_ids))
        prompt_tokens = self._max_length - (label_length - 1)
        if prompt_tokens <= 0:
            raise ValueError(
                f"max_length {self._max_length} leaves no room for a prompt before labels of {label_length} "
                "tokens; raise it"
            )
        if not spec.apply_chat_template and spec.add_special_tokens:
            last_token = self._tokenizer("a", verbose=False)["input_ids"][-1]
            if last_token != self._token_ids("a")[-1]:
                raise ValueError(
                    f"the tokenizer of {self._tokenizer.name_or_path} ends each text with "
                    f"{self._tokenizer.convert_ids_to_tokens(last_token)}, behind which no label can follow; set "
                    "add_special_tokens: false, or in tokenizer_kwargs add_eos_token: false"
                )
        prompt = self._new_prompt(spec, prompt_tokens)
        fixed_tokens = prompt.fixed_tokens()
        if fixed_tokens > prompt_tokens:
            raise ValueError(too_much_text(fixed_tokens, prompt_tokens, ()))
        return prompt

    def _new_prompt(self, spec: CausalSpec, tokens: int) -> Prompt:
        prompt_class = ChatPrompt if spec.apply_chat_template else Prompt
        return prompt_class(spec, self._tokenizer, tokens)

    def _make_classifier(self, loaded: Loaded) -> LabelScorer:
        spec, ids, positions = self._spec, self._label_ids, CHOICE_POSITIONS
        label_texts = _CHOICES_OF_WARMUP
        if spec.choices is None:
            label_texts = tuple(spec.label_tokens[label] for label in spec.labels)
            positions = max(map(len, ids))
        texts = LabelTexts(ids, self._divisors(ids, label_texts))
        return LabelScorer(loaded.model, loaded.pad_token_id, texts, len(spec.labels), positions)

    def _divisors(self, ids: Sequence[tuple[int, ...]], texts: Sequence[str]) -> tuple[float, ...]:
        if self._spec.length_normalize == "tokens":
            return tuple(float(len(tokens)) for tokens in ids)
        if self._spec.length_normalize == "bytes":
            return tuple(float(len(text.encode())) for text in texts)
        return (1.0,) * len(ids)

    def _notes(self) -> list[str]:
        spec = self._spec
        labels: list[tuple[str, tuple[int, ...]]] = []
        if spec.choices is None:
            label_texts = (spec.label_tokens[label] for label in spec.labels)
            labels = list(zip(label_texts, self._label_ids, strict=True))
        texts = [self._prompts[0].whole(text) for text in self._first_texts if isinstance(text, str)]
        joined = 0
        for text in texts:
            prompt_ids = self._token_ids(text)
            joined += any(self._token_ids(text + label) != [*prompt_ids, *ids] for label, ids in labels)
        notes = []
        if spec.apply_chat_template and "strftime_now" in str(self._tokenizer.chat_template):
            notes.append(
                "its chat template tells the model today's date, so its numbers change from day to day"
            )
        if joined:
            notes.append(
                f"in {joined} of its first {len(texts)} rows the tokenizer makes other tokens of a label's text "
                "behind the prompt than by itself; end the prompt where a word ends, and let label_tokens begin "
                "with the space"
            )
        return notes

    def _values(self, logits: torch.Tensor) -> npt.NDArray[np.float64]:
        return probabilities(logits[:, :-1], "softmax")

    def _more_counters(self, logits: torch.Tensor) -> Counters:
        others = logits[:, -1:].double().exp()
        other_mass = float(others[torch.isfinite(others)].sum())
        return replace(super()._more_counters(logits), other_mass=other_mass)


class ChatPrompt(Prompt):
    """Make prompts whose text is the user's message; they end where the answer begins.

    A long message loses tokens, at its beginning or its end by ``truncation_side``; the chat template's own text
    stays whole.
    """

    def __init__(self, spec: CausalSpec, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._system = spec.system_instruction
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise ValueError(
                f"apply_chat_template: the tokenizer of {name} has no chat template; copy chat_template.jinja, or "
                "leave the key out and write the prompt yourself"
            )
        try:
            self._before, mark, self._behind = self.whole(_MARK).partition(_MARK)
        except Exception as error:  # templates raise any error, such as for a role that they do not know
            key = "apply_chat_template" if self._system is None else "system_instruction"
            raise ValueError(
                f"{key}: the chat template of {name} refuses it ({str(error).splitlines()[0]}); put an "
                "instruction into prompt_template instead"
            ) from error
        if not mark:
            raise ValueError(
                f"apply_chat_template: the chat template of {name} leaves the user's message out"
            )
        fixed = len(tokenizer(self._before + self._behind, add_special_tokens=False)["input_ids"])
        if fixed >= max_length:
            raise ValueError(
                f"the chat template and system_instruction take {fixed} tokens, and max_length leaves {max_length} "
                "for a prompt; raise max_length"
            )
        # The chat template has the special tokens already.
        super().__init__(replace(spec, add_special_tokens=False), tokenizer, max_length)

    def whole(self, message: str) -> str:
        """Return the chat up to where the answer begins."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, {"role": "user", "content": message}]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _shorten(self, text: Text, inputs: Arrays, encoding: Any) -> Arrays:
        tokens = len(inputs["input_ids"])
        of_message = np.arange(tokens)
        if encoding is not None:
            offsets, stop = np.array(encoding.offsets), len(self.whole(str(text))) - len(self._behind)
            of_message = np.flatnonzero((offsets[:, 0] >= len(self._before)) & (offsets[:, 1] <= stop))
        excess, is_left = tokens - self._max_length, self._tokenizer.truncation_side == "left"
        dropped = of_message[:excess] if is_left else of_message[len(of_message) - excess :]
        kept = np.delete(np.arange(tokens), dropped)
        # Tokens that join message and template stay; if the message has too few tokens, the template is cut.
        kept = kept[-self._max_length :] if is_left else kept[: self._max_length]
        return {name: values[kept] for name, values in inputs.items()}
