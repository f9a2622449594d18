"""Define the keys of a language model that is scored at label tokens."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from ensemble.common.text import listed
from ensemble.config.document import Problem, place
from ensemble.config.values import Column, MustBe, Text, as_label, foreign_label
from ensemble.members.huggingface.settings import TextSettings

Verbalizer = Annotated[
    str, BeforeValidator(as_label), StringConstraints(min_length=1), MustBe("text, and not empty")
]
LabelTokens = Annotated[dict[str, Verbalizer], MustBe("a mapping of labels to texts", dict)]


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
        if len(labels) == 1:
            yield ("label_tokens",), "there must be two labels or more to choose from"
        label_by_text: dict[str, str] = {}
        for label, text in self.label_tokens.items():
            first = label_by_text.setdefault(text, label)
            if labels and label not in labels:
                yield ("label_tokens", label), foreign_label(labels)
            elif first != label:
                yield ("label_tokens", label), f"the same text as {place(('label_tokens', first))} has"
        missing = [label for label in labels if label not in self.label_tokens]
        if missing:
            yield ("label_tokens",), f"has no text for {listed(missing)}; each label needs one"

    def _broken_choices(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.label_tokens:
            yield ("label_tokens",), "choices has the texts of each row; keep one of the two"
        if self.single_token:
            yield ("single_token",), "is about label_tokens; choices may have any number of tokens"
        yield from self.label_problems(labels)
