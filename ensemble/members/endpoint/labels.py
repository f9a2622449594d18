"""Score labels by a server's answers.

A server that tells tokens (``/tokenize``), and the log-probabilities of those that it is asked for, scores labels
of any number of tokens, as ``causal_lm`` does; vLLM is one.  Any other gives its likeliest first tokens, in which
labels are found by their text.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.common.activations import softmax
from ensemble.common.errors import MemberError
from ensemble.common.text import listed
from ensemble.members.endpoint.server import RowRefused, Server
from ensemble.members.label_tokens import token_problems

# Long enough for servers that compute one token in another way than several.
_TRIAL = "Which of these labels is right for the text?"


@contextlib.contextmanager
def _known_form() -> Iterator[None]:
    """Raise RowRefused where an answer of another form than OpenAI's causes an error."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RowRefused(f"the server answers in another form than OpenAI's ({problem})") from None


# A row's probabilities, float64 [labels], and that of the tokens of no label.
Answer = tuple[npt.NDArray[np.float64], float]


class LabelScorer:
    """Score the labels behind prompts, from several threads.  ``settings`` are the worker's.

    Methods raise what ``Server.ask`` raises.
    """

    def __init__(self, server: Server, settings: Mapping[str, Any], labels: Sequence[str]) -> None:
        self._server, self._settings, self._labels = server, settings, labels
        self._api: str = settings["api"]
        self._top: int = settings["top_logprobs"]
        self._texts = {label: settings["label_tokens"].get(label, "") for label in labels}
        self._body = {**settings["extra_body"], "model": settings["model"]}
        # The tokens of each label's text, and what stands before each of them: nothing, or a label's beginning.
        self._ids: list[tuple[int, ...]] = []
        self._beginnings: list[tuple[int, ...]] = []

    @_known_form()
    def prepare(self) -> None:
        """Check that the server has the model, and find out what it tells, by the run's first requests."""
        name, listing = self._settings["model"], self._server.ask("models", is_optional=True)
        models = listing.get("data") if isinstance(listing, dict) else listing
        names = [model["id"] for model in models or ()]
        if names and name not in names:
            raise MemberError(
                f"model: the server has none of the name {name}; it has {listed(names, 9, str)}"
            )
        if self._api == "classify":
            return
        ids: dict[str, tuple[int, ...]] = {}
        for label, text in self._texts.items():
            body = {**self._body, "prompt": text, "add_special_tokens": False}
            tokens = (self._server.ask("/tokenize", body, is_optional=True) or {}).get("tokens")
            if not tokens:
                return
            ids[label] = tuple(tokens)
        problems = [*token_problems(ids, {}, single_token=False)]
        if problems:
            raise MemberError(problems)
        trial = self._server.ask("completions", self._next_token(_TRIAL, ids.values()), is_optional=True)
        asked = {f"token_id:{token}" for tokens in ids.values() for token in tokens}
        if trial is not None and asked <= _likeliest(trial["choices"][0]).keys():
            self._ids = [*ids.values()]
            self._beginnings = sorted(
                {tokens[:place] for tokens in self._ids for place in range(len(tokens))}
            )

    @_known_form()
    def score(self, text: str) -> Answer:
        """Return the answer for a prompt."""
        if self._api == "classify":
            return self._classes(text)
        return self._by_tokens(text) if self._ids else self._by_text(text)

    def _by_tokens(self, text: str) -> Answer:
        """Score the tokens of each label, one by one, behind those of the prompt."""
        prompts: list[str] | list[list[int]] = [text]  # of which the server makes the same tokens itself
        if self._api == "chat" or len(self._beginnings) > 1 or not text:
            chat = {**_chat(text), "add_generation_prompt": True}
            prompt = chat if self._api == "chat" else {"prompt": text}
            tokens = self._server.ask("/tokenize", {**self._body, **prompt})["tokens"]
            prompts = [[*tokens, *beginning] for beginning in self._beginnings]
        document = self._server.ask("completions", self._next_token(prompts, self._ids))
        behind = {self._beginnings[choice["index"]]: _likeliest(choice) for choice in document["choices"]}
        steps = [
            [behind[ids[:place]][f"token_id:{token}"] for place, token in enumerate(ids)] for ids in self._ids
        ]
        return self._answer(steps, [ids[0] for ids in self._ids])

    def _by_text(self, text: str) -> Answer:
        """Score labels among the likeliest first tokens."""
        if self._api == "chat":
            asked = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": self._top}
            document = self._server.ask("chat/completions", {**self._body, **_chat(text), **asked})
        else:
            document = self._server.ask("completions", self._next_token(text))
        likeliest, texts = _likeliest(document["choices"][0]), [*self._texts.values()]
        missing = next((text for text in texts if text not in likeliest), None)
        if missing is None:
            return self._answer([[likeliest[text]] for text in texts], texts)
        if len(likeliest) < self._top:
            given = f"the server gives {len(likeliest)} tokens of {self._top} asked for"
            raise MemberError(f"top_logprobs: {given}, and {missing!r} is not among them; let it give more")
        begun = [f"{token!r}" for token in likeliest if token and missing.startswith(token)]
        hint = f", but {begun[0]} is, and one token is read: take a text of one token" if begun else ""
        raise RowRefused(
            f"label_tokens: {missing!r} is not among the {self._top} likeliest first tokens{hint}"
        )

    def _answer(self, steps: Sequence[Sequence[float]], firsts: Sequence[object]) -> Answer:
        """Return the answer from the log-probabilities of labels' tokens, of which ``firsts`` are the first."""
        scores = np.array([math.fsum(values) for values in steps])
        if self._settings["length_normalize"] == "tokens":
            scores /= [len(values) for values in steps]
        elif self._settings["length_normalize"] == "bytes":
            scores /= [len(text.encode()) for text in self._texts.values()]
        of_firsts = {first: values[0] for first, values in zip(firsts, steps, strict=True)}
        others = max(0.0, 1 - math.fsum(map(math.exp, of_firsts.values())))
        return softmax(scores[None])[0], others

    def _classes(self, text: str) -> Answer:
        """Return what a classifier says, which names the likeliest label alone, and the others by their places."""
        document = self._server.ask("/classify", {**self._body, "input": [text]})
        likeliest, probabilities = document["data"][0]["label"], document["data"][0]["probs"]
        label_map = self._settings["label_map"] or {label: label for label in self._labels}
        values = dict(zip(label_map.values(), probabilities, strict=False))
        if len(probabilities) != len(label_map) or values.get(label_map.get(likeliest)) != max(probabilities):
            place = 1 + int(np.argmax(probabilities))
            raise MemberError(
                f"label_map: the server has {len(probabilities)} labels, and number {place} is {likeliest!r}; name "
                "all in their order"
            )
        return np.array([values[label] for label in self._labels]), 0.0

    def _next_token(self, prompt: object, ids: Iterable[tuple[int, ...]] = ()) -> dict[str, Any]:
        """Return a request for the log-probabilities of what follows prompts: these tokens, or the likeliest."""
        body = {**self._body, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": self._top}
        asked = sorted({token for tokens in ids for token in tokens})
        by_id = {"logprobs": 1, "logprob_token_ids": asked, "return_tokens_as_token_ids": True}
        return {**body, **by_id} if asked else body


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _likeliest(choice: Mapping[str, Any]) -> dict[str, float]:
    """Return the log-probabilities of tokens behind a prompt, by their text or what they are called."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):  # of chats, and of all answers of llama.cpp and Ollama
        top = logprobs["content"][0]["top_logprobs"]  # of two with the same text the first is likelier
        return {entry["token"]: entry["logprob"] for entry in reversed(top)}
    if not logprobs.get("top_logprobs"):
        raise RowRefused("top_logprobs: the server gives no log-probabilities; switch them on there")
    likeliest: dict[str, float] = logprobs["top_logprobs"][0]
    return likeliest
