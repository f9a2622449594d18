"""Rows as messages of a chat, in the tokenizer's own template, which is never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.members.causal_lm.spec import CausalSpec
from ensemble.members.huggingface.scoring.encode import Inputs, Prompt, Text

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

    def _tokenize(
        self, texts: Sequence[Text], is_cut: bool = True
    ) -> tuple[Inputs, npt.NDArray[np.int64], npt.NDArray[np.int64], Sequence[Any] | None]:
        inputs, lengths, cut, encodings = super()._tokenize(texts, is_cut=False)
        if not is_cut:
            return inputs, lengths, cut, encodings
        for row in np.flatnonzero(lengths > self._max_length).tolist():
            offsets = None if encodings is None else np.array(encodings[row].offsets)
            kept = self._kept(int(lengths[row]), self.whole(str(texts[row])), offsets)
            for arrays in inputs.values():
                arrays[row] = arrays[row][kept]
            cut[row] = lengths[row] - len(kept)
            lengths[row] = len(kept)
        return inputs, lengths, cut, encodings

    def _kept(self, tokens: int, chat: str, offsets: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        """Return which tokens of a chat stay when the message loses as many as are too many.

        Args:
            offsets: where each token begins and ends in the chat, [tokens, 2]; None if the tokenizer does not tell.
        """
        before, behind = self._before, self._behind
        is_same_template = chat.startswith(before) and chat.endswith(behind)
        if not is_same_template:  # a template with the date, after midnight
            before, _, behind = self.whole(_MARK).partition(_MARK)
            is_same_template = chat.startswith(before) and chat.endswith(behind)
        of_message = np.arange(tokens)
        if offsets is not None and is_same_template:
            start, stop = len(before), len(chat) - len(behind)
            of_message = np.flatnonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= stop))
        excess = tokens - self._max_length
        is_left = self._tokenizer.truncation_side == "left"
        dropped = of_message[:excess] if is_left else of_message[len(of_message) - excess :]
        kept: npt.NDArray[np.int64] = np.delete(np.arange(tokens), dropped)
        # Tokens that join message and template stay; if the message has too few tokens, the template is cut, too.
        return kept[-self._max_length :] if is_left else kept[: self._max_length]
