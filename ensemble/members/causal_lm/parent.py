"""Describe language models that are scored at label tokens, on the parent's side."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.config import MemberConfig
from ensemble.config.document import Problem
from ensemble.config.values import Column, Text
from ensemble.members.base import Assigned, Draft, OutputColumns, Reads
from ensemble.members.footprint import MemoryEstimate
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.inspect import (
    Checkpoint,
    is_language_model,
    read_checkpoint,
    row_limit,
)
from ensemble.members.huggingface.memory import checkpoint_memory
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.settings import TextSettings
from ensemble.members.huggingface.spec import CHILD, LANGUAGE_MODEL
from ensemble.members.label_tokens import CHOICE_POSITIONS, token_problems
from ensemble.members.prompts import LabelTokens, broken_label_tokens, space_warnings

# Keys on which predictions depend, beside those of all members that read text.
_KEYS = {"label_tokens", "length_normalize", "apply_chat_template", "system_instruction"}


class CausalSettings(TextSettings):
    """A language model that says which label's text comes next, by the probabilities of its tokens."""

    task_type: Literal["causal_lm"] = "causal_lm"
    # The text of each label that follows the prompt, with the space before it where there is one; or choices.
    label_tokens: LabelTokens = Field(default_factory=dict, examples=["{pos: ' good', neg: ' bad'}"])
    # Column with a JSON list of each row's own texts; the labels are their positions: "0", "1" and so on.
    choices: Column | None = None
    single_token: bool = False  # demands that each label's text is one token
    # What a text's log-probability is divided by: nothing, its number of tokens, or its length in UTF-8 bytes.
    length_normalize: Literal["none", "tokens", "bytes"] = "none"
    # The prompt becomes the user's message, and the label begins the answer.
    apply_chat_template: bool = False
    system_instruction: Text | None = None  # the system's message; needs apply_chat_template
    # Where a long prompt is cut; its end asks for the label.
    truncation_side: Literal["left", "right"] = "left"

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        *TextSettings.alternatives,
        ("label_tokens", "choices"),
    )
    training_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    older_keys: ClassVar[Mapping[str, str]] = {
        **TextSettings.older_keys,
        "label_tokens": "verbalizer verbalizers label_words label_texts",
        "length_normalize": "length_normalization normalize_length acc_norm",
        "apply_chat_template": "chat chat_template use_chat_template",
        "system_instruction": "system system_prompt system_message",
    }

    @property
    def label_behind_prompt(self) -> str:
        return "" if self.apply_chat_template else next(iter(self.label_tokens.values()), "")

    @property
    def fixed_text(self) -> str:
        return (self.system_instruction or "") + super().fixed_text

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if isinstance(self.text_column, tuple):
            yield ("text_column",), "must be one column here; put both into a prompt_template"
        if self.system_instruction is not None and not self.apply_chat_template:
            yield ("system_instruction",), "needs apply_chat_template: true"
        if self.truncation_side == "right" and self.prompt_template is not None:
            yield (
                ("truncation_side",),
                "would cut the end of the prompt, which asks for the label; leave it out, or say with truncation "
                "which columns may be cut",
            )
        if self.choices is not None:
            yield from self._broken_choices(labels)
            return
        if not self.label_tokens:
            yield (
                (),
                "label_tokens or choices is required, for example label_tokens: {pos: ' good', neg: ' bad'}",
            )
            return
        yield from broken_label_tokens(self.label_tokens, labels)

    def _broken_choices(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.label_tokens:
            yield ("label_tokens",), "choices has the texts of each row; keep one of the two"
        if self.single_token:
            yield ("single_token",), "is about label_tokens; choices may have any number of tokens"
        yield from self.label_problems(labels)


class CausalLanguageModel(TextCheckpoint[CausalSettings]):
    """Describe a language model that transformers loads, and the texts that stand for the labels."""

    Settings: ClassVar[type[MemberConfig]] = CausalSettings
    child: ClassVar[str] = f"{CHILD}:ensemble.members.causal_lm.predictor.CausalMember"
    auto_class: ClassVar[str] = LANGUAGE_MODEL
    examples: ClassVar[str] = "ensemble.members.causal_lm.training:LabelTextExamples"
    cuts_beginning: ClassVar[bool] = True

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        if Path(source).is_file() or (Path(source) / "adapter_config.json").is_file():
            return None
        path = find_file(source, "config.json")
        config = read_config(path, f"{source}: its config.json")
        if not is_language_model(config, path.parent):
            return None
        names = ("chat_template.jinja", "chat_template.json")
        has_file = any((path.parent / name).is_file() for name in names)
        is_chat = has_file or bool(read_json(path.parent / "tokenizer_config.json").get("chat_template"))
        settings: dict[str, Any] = {"task_type": "causal_lm", "model_name_or_path": source}
        if is_chat:
            settings["apply_chat_template"] = True
        return Draft(
            settings=settings,
            max_length=row_limit(config, path.parent),
            of_labels=("label_tokens", str if is_chat else " {}".format),
            guess="what the model would say for each label; and let the prompt end with the question",
        )

    def reads(self) -> Reads:
        return replace(super().reads(), choices=self.settings.choices)

    def inspect(self, columns: OutputColumns) -> Checkpoint:
        model = self.settings
        checkpoint = read_checkpoint(model, self.auto_class)
        problems = [*token_problems(self._label_ids(checkpoint), {}, model.single_token)]
        if problems:
            raise CheckpointError(problems)
        return replace(checkpoint, activation="softmax", label_order=tuple(range(len(columns.labels))))

    def _label_ids(self, inspected: Checkpoint) -> dict[str, Sequence[int]]:
        """Return the tokens of each label's text; empty where only the worker can tell."""
        return dict(zip(self.settings.label_tokens, inspected.facts.text_ids, strict=False))

    def prompt_warnings(self, prompt: str) -> Iterator[str]:
        texts = self.settings.label_tokens.values() if self.settings.label_behind_prompt else ()
        yield from space_warnings(prompt, texts)

    def memory(
        self, inspected: Checkpoint, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        ids = self._label_ids(inspected)
        # Where the tokenizer cannot be read, each byte of a text may be a token.
        positions = CHOICE_POSITIONS
        if self.settings.choices is None:
            texts = self.settings.label_tokens.values()
            positions = max(map(len, ids.values())) if ids else max(len(text.encode()) for text in texts)
        return checkpoint_memory(self.settings, inspected, lengths, labels, vocabulary_positions=positions)

    def fingerprint(self, inspected: Checkpoint, assigned: Assigned) -> Mapping[str, object]:
        return {**super().fingerprint(inspected, assigned), **self.settings.model_dump(include=_KEYS)}

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        keys = self.settings.model_dump(include={"choices", "single_token", *_KEYS})
        return {**super().worker_settings(inspected, assigned, offload_folder), **keys}
