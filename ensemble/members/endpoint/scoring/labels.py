"""Score labels by a server's answers.

A server that tells tokens (``/tokenize``), and the log-probabilities of those that it is asked for, scores labels
of any number of tokens, as ``causal_lm`` does; vLLM is one.  Any other gives its likeliest first tokens, in which
labels are found by their text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.common.activations import softmax
from ensemble.common.errors import MemberError
from ensemble.common.text import listed
from ensemble.members.endpoint.scoring.client import Client, RowRefused
from ensemble.members.label_tokens import token_problems

# Long enough for servers that compute one token in another way than several.
_TRIAL = "Which of these labels is right for the text?"


@dataclass(frozen=True)
class Answer:
    """Hold a row's probabilities, float64 [labels], that of tokens of no label, and the tokens of its prompt."""

    values: npt.NDArray[np.float64]
    other_mass: float
    tokens: int


class LabelScorer:
    """Score the labels behind prompts, from several threads.  ``settings`` are the worker's.

    Methods raise what ``Client.ask`` raises.
    """

    def __init__(self, client: Client, settings: Mapping[str, Any], labels: Sequence[str]) -> None:
        self._client, self._settings, self._labels = client, settings, labels
        self._api: str = settings["api"]
        self._top: int = settings["top_logprobs"]
        self._texts = [settings["label_tokens"].get(label, "") for label in labels]
        self._body = {**settings["extra_body"], "model": settings["model"]}
        # Of a classifier, by the server's labels in their order.
        self._label_map: Mapping[str, str] = settings["label_map"] or {label: label for label in labels}
        # The tokens of each label's text, and what stands before each of them: nothing, or a label's beginning.
        self._ids: list[tuple[int, ...]] = []
        self._beginnings: list[tuple[int, ...]] = []

    def prepare(self) -> None:
        """Check that the server has the model, and find out what it tells, by the run's first requests."""
        name, listing = self._settings["model"], self._client.ask("models", is_optional=True)
        models = listing.get("data") if isinstance(listing, dict) else listing
        names = [model["id"] for model in models or ()]
        if names and name not in names:
            raise MemberError(
                f"model: the server has none of the name {name}; it has {listed(names, 9, str)}"
            )
        ids: dict[str, tuple[int, ...]] = {}
        for label, text in zip(self._labels, self._texts, strict=True):
            body = {**self._body, "prompt": text, "add_special_tokens": False}
            tokens = (self._client.ask("/tokenize", body, is_optional=True) or {}).get("tokens")
            if self._api == "classify" or not tokens:
                return
            ids[label] = tuple(tokens)
        problems = [*token_problems(ids, {}, single_token=False)]
        if problems:
            raise MemberError("; ".join(problems))
        asked = self._next_token(_TRIAL, [*ids.values()])
        trial = self._client.ask("completions", asked, is_optional=True)
        names_of_tokens = {f"token_id:{token}" for token in asked["logprob_token_ids"]}
        if trial is not None and names_of_tokens <= _likeliest(trial["choices"][0]).keys():
            self._ids = [*ids.values()]
            self._beginnings = sorted(
                {tokens[:place] for tokens in self._ids for place in range(len(tokens))}
            )

    def score(self, text: str) -> Answer:
        """Return the answer for a prompt."""
        if self._api == "classify":
            return self._classes(text)
        return self._by_tokens(text) if self._ids else self._by_text(text)

    def _by_tokens(self, text: str) -> Answer:
        """Score the tokens of each label, one by one, behind those of the prompt."""
        prompts: list[str] | list[list[int]] = [text]  # of which the server makes the same tokens itself
        if self._api == "chat" or len(self._beginnings) > 1 or not text:
            prompt: dict[str, Any] = {"prompt": text}
            if self._api == "chat":
                prompt = {"messages": self._messages(text), "add_generation_prompt": True}
            tokens = self._client.ask("/tokenize", {**self._body, **prompt})["tokens"]
            prompts = [[*tokens, *beginning] for beginning in self._beginnings]
        document = self._client.ask("completions", self._next_token(prompts, self._ids))
        choices = sorted(document["choices"], key=lambda choice: int(choice["index"]))
        behind = dict(zip(self._beginnings, map(_likeliest, choices), strict=True))
        steps = [
            [behind[ids[:place]][f"token_id:{token}"] for place, token in enumerate(ids)] for ids in self._ids
        ]
        return self._answer(steps, [ids[0] for ids in self._ids], document)

    def _by_text(self, text: str) -> Answer:
        """Score labels among the likeliest first tokens."""
        if self._api == "chat":
            asked = {"messages": self._messages(text), "max_tokens": 1, "temperature": 0}
            logprobs = {"logprobs": True, "top_logprobs": self._top}
            document = self._client.ask("chat/completions", {**self._body, **asked, **logprobs})
        else:
            document = self._client.ask("completions", self._next_token(text))
        likeliest = _likeliest(document["choices"][0])
        missing = next((text for text in self._texts if text not in likeliest), None)
        if missing is None:
            return self._answer([[likeliest[text]] for text in self._texts], self._texts, document)
        if len(likeliest) < self._top:
            given = f"the server gives {len(likeliest)} tokens of {self._top} asked for"
            raise MemberError(f"top_logprobs: {given}, and {missing!r} is not among them; let it give more")
        begun = [f"{token!r}" for token in likeliest if token and missing.startswith(token)]
        hint = f", but {begun[0]} is, and one token is read: take a text of one token" if begun else ""
        raise RowRefused(
            f"label_tokens: {missing!r} is not among the {self._top} likeliest first tokens{hint}"
        )

    def _answer(self, steps: Sequence[Sequence[float]], firsts: Sequence[object], document: Any) -> Answer:
        """Return the answer from the log-probabilities of labels' tokens, of which ``firsts`` are the first."""
        scores = np.array([math.fsum(values) for values in steps])
        if self._settings["length_normalize"] == "tokens":
            scores /= [len(values) for values in steps]
        elif self._settings["length_normalize"] == "bytes":
            scores /= [len(text.encode()) for text in self._texts]
        of_firsts = {first: values[0] for first, values in zip(firsts, steps, strict=True)}
        others = max(0.0, 1 - math.fsum(map(math.exp, of_firsts.values())))
        return Answer(softmax(scores[None])[0], others, document["usage"]["prompt_tokens"])

    def _classes(self, text: str) -> Answer:
        """Return what a classifier says, which names the likeliest label alone, and the others by their places."""
        document = self._client.ask("/classify", {**self._body, "input": [text]})
        likeliest, probabilities = document["data"][0]["label"], document["data"][0]["probs"]
        by_name = dict(zip(self._label_map, probabilities, strict=False))
        if len(probabilities) != len(self._label_map) or by_name.get(likeliest) != max(probabilities):
            place = 1 + int(np.argmax(probabilities))
            raise MemberError(
                f"label_map: the server has {len(probabilities)} labels, and number {place} is {likeliest!r}; name "
                "all in their order"
            )
        by_label = {label: by_name[name] for name, label in self._label_map.items()}
        values = np.array([by_label[label] for label in self._labels])
        return Answer(values, 0.0, document["usage"]["prompt_tokens"])

    def _next_token(self, prompt: object, ids: Sequence[tuple[int, ...]] = ()) -> dict[str, Any]:
        """Return a request for the log-probabilities of what follows prompts: these tokens, or the likeliest."""
        body = {**self._body, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": self._top}
        asked = sorted({token for tokens in ids for token in tokens})
        by_id = {"logprobs": 1, "logprob_token_ids": asked, "return_tokens_as_token_ids": True}
        return {**body, **by_id} if asked else body

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = self._settings["system_instruction"]
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": text}]


def _likeliest(choice: Mapping[str, Any]) -> dict[str, float]:
    """Return the log-probabilities of tokens behind a prompt, by their text or what they are called."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):  # of chats, and of all answers of llama.cpp and Ollama
        top = logprobs["content"][0]["top_logprobs"]  # of two with the same text the first is likelier
        return {entry["token"]: entry["logprob"] for entry in reversed(top)}
    if not logprobs.get("top_logprobs"):
        raise MemberError("top_logprobs: the server gives no log-probabilities; switch them on there")
    likeliest: dict[str, float] = logprobs["top_logprobs"][0]
    return likeliest
