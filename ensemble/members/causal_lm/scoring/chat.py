"""Rows as messages of a chat, in the tokenizer's own template, which is never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ensemble.members.causal_lm.spec import CausalSpec
from ensemble.members.huggingface.scoring.encode import Prompt, Text
from ensemble.members.huggingface.scoring.truncation import Arrays

# A placeholder for a message, which templates leave unchanged.
_MARK = "MESSAGE7f3a"


class ChatPrompt(Prompt):
    """A prompt whose text is the user's message, and that ends where the answer begins.

    A long message loses tokens, at its beginning or its end by ``truncation_side``; the chat template's own text
    stays whole.

    Args:
        tokenizer: with a chat template, which transformers renders in a sandbox.
        max_length: tokens a row may have, the template's included.

    Raises:
        ValueError: there is no chat template, it refuses the messages, or leaves no room for a message.
    """

    def __init__(self, spec: CausalSpec, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._system = spec.system_instruction
        name = spec.model_name_or_path
        if not tokenizer.chat_template:
            raise ValueError(
                f"apply_chat_template: the tokenizer of {name} has no chat template; copy chat_template.jinja, or "
                "leave the key out and write the prompt yourself"
            )
        try:
            self._before, mark, self._behind = self.whole(_MARK).partition(_MARK)
            has_message = bool(self.whole("")) and bool(mark)
        except Exception as error:  # templates raise any error, such as for a role that they do not know
            key = "apply_chat_template" if self._system is None else "system_instruction"
            raise ValueError(
                f"{key}: the chat template of {name} refuses it ({str(error).splitlines()[0]}); put an "
                "instruction into prompt_template instead"
            ) from error
        if not has_message:
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

    def _shorten(
        self, texts: Sequence[Text], arrays: Sequence[Arrays], encodings: Sequence[Any] | None
    ) -> list[Arrays]:
        shorter = []
        for index, inputs in enumerate(arrays):
            tokens = len(inputs["input_ids"])
            of_message = np.arange(tokens)
            if encodings is not None:
                chat, offsets = self.whole(str(texts[index])), np.array(encodings[index].offsets)
                start, stop = len(self._before), len(chat) - len(self._behind)
                of_message = np.flatnonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= stop))
            excess = tokens - self._max_length
            is_left = self._tokenizer.truncation_side == "left"
            dropped = of_message[:excess] if is_left else of_message[len(of_message) - excess :]
            kept = np.delete(np.arange(tokens), dropped)
            # Tokens that join message and template stay; if the message has too few tokens, the template is cut.
            kept = kept[-self._max_length :] if is_left else kept[: self._max_length]
            shorter.append({name: values[kept] for name, values in inputs.items()})
        return shorter
