"""A server with OpenAI's interface, as vLLM has it, over a tiny model by plain transformers.

    python -m tests.members.endpoint.stub --port 8000 FOLDER

FOLDER holds ``model``, a checkpoint; without it the server has a toy whose numbers follow from letters.  In
``behaviour.json``, read anew for every request, a test says what is odd about the server; the paths and prompts of
requests that were answered are appended to ``requests``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from tests.faults import faulty

NAME = "tiny"
WORDS = ("plants", "food", "animal", "river", "person")


class Toy:
    """Word number w has the log-probability of a score of the prompt's first letters."""

    def __init__(self, folder: Path) -> None:
        self.names = [*WORDS]

    def behind(self, prompt: Any) -> list[float]:
        letters = [ord(letter) for letter in prompt[:40]]
        scores = [[float(sum(letters) % number) for number in (7, 11, 5, 3, 2)]]
        values = _Rows(scores)
        faulty.happen([letters], values)
        total = math.log(math.fsum(map(math.exp, scores[0])))
        return [score - total for score in scores[0]]


class _Rows(list[Any]):
    def __setitem__(self, rows: Any, value: Any) -> None:
        for row in rows:
            self[row][:] = [value] * len(self[row])


class Checkpoint:
    """A language model, or a classifier."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        is_classifier = str(config.architectures[0]).endswith("ForSequenceClassification")
        auto = transformers.AutoModelForSequenceClassification if is_classifier else None
        self.model = (auto or transformers.AutoModelForCausalLM).from_pretrained(folder).eval()
        self.labels = config.id2label

    @cached_property
    def names(self) -> list[str]:
        return [self.tokenizer.decode([token]) for token in range(self.model.config.vocab_size)]

    def ids(self, prompt: Any, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def logits(self, ids: Sequence[int]) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids])).logits[0].double()

    def behind(self, prompt: Any) -> list[float]:
        values: list[float] = self.logits(self.ids(prompt))[-1].log_softmax(-1).tolist()
        return values

    def chat(self, messages: Any) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    model: Any
    lock = Lock()

    def do_GET(self) -> None:
        self.serve(None)

    def do_POST(self) -> None:
        self.serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def serve(self, body: Any) -> None:
        odd = self.behaviour()
        if self.path == "/health":
            return self.answer(200, b"")
        if odd.get("key") and self.headers["Authorization"] != f"Bearer {odd['key']}":
            return self.answer(401, {"error": "Unauthorized"})
        fault = odd if self.path.startswith(odd.get("path", "/")) and self.is_due(odd) else {}
        if fault.get("kill"):
            os._exit(3)
        time.sleep(fault.get("sleep", 0))
        if "status" in fault:
            content = fault.get("html", {"error": {"message": "an odd error"}})
            return self.answer(fault["status"], content, fault.get("headers", {}))
        if self.path == "/v1/models":
            names = odd.get("models", [NAME])
            return self.answer(200, {"object": "list", "data": [{"id": name} for name in names]})
        try:
            with self.lock:
                document = getattr(self, self.path.strip("/").replace("/", "_"))(body, odd)
        except AttributeError:
            return self.answer(404, {"detail": "Not Found"})
        except Exception as error:
            return self.answer(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
        if self.path != "/tokenize" and odd == self.behaviour():  # else it was asked by an earlier test
            with self.lock, (self.folder / "requests").open("a") as requests:
                requests.write(json.dumps([self.path, body]) + "\n")
        return self.answer(200, {"usage": {"prompt_tokens": 7}, **document})

    def behaviour(self) -> Any:
        file = self.folder / "behaviour.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def is_due(self, odd: Any) -> bool:
        """Whether it shall happen another time; the file counts."""
        if "times" not in odd:
            return True
        with self.lock:
            counted = self.folder / "times"
            times = int(counted.read_text()) if counted.exists() else 0
            counted.write_text(str(times + 1))
        return times < int(odd["times"])

    def tokenize(self, body: Any, odd: Any) -> Any:
        if odd.get("tells") is False or isinstance(self.model, Toy):
            raise AttributeError
        if "messages" in body:
            return {"tokens": self.model.chat(body["messages"])}
        return {"tokens": self.model.ids(body["prompt"], body.get("add_special_tokens", True))}

    def v1_completions(self, body: Any, odd: Any) -> Any:
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        prompts = prompts if isinstance(prompts[0], str | list) else [prompts]
        choices: list[Any] = []
        for index, prompt in enumerate(prompts):
            by_token = self.likeliest(self.model.behind(prompt), body["logprobs"], body, odd)
            choices.append({"index": index, "logprobs": {"top_logprobs": [by_token]}})
        if odd.get("logprobs") == "off":
            choices = [{**choice, "logprobs": None} for choice in choices]
        return {"choices": choices[::-1]}

    def v1_chat_completions(self, body: Any, odd: Any) -> Any:
        is_toy = isinstance(self.model, Toy)
        prompt = body["messages"][-1]["content"] if is_toy else self.model.chat(body["messages"])
        top = self.likeliest(self.model.behind(prompt), body["top_logprobs"], body, odd)
        entries = [{"token": token, "logprob": value} for token, value in top.items()]
        logprobs = None if odd.get("logprobs") == "off" else {"content": [{"top_logprobs": entries}]}
        return {"choices": [{"index": 0, "logprobs": logprobs}]}

    def likeliest(self, values: list[float], count: int, body: Any, odd: Any) -> dict[str, float]:
        order = sorted(range(len(values)), key=lambda token: -values[token])
        if count > odd.get("most", 20):
            raise ValueError(f"Requested sample logprobs of {count}, which is greater than max allowed")
        kept = order[: odd.get("gives", count)]
        if "logprob_token_ids" in body and odd.get("asked", True):
            kept = [order[0], *body["logprob_token_ids"]]
        by_id = body.get("return_tokens_as_token_ids")
        return {f"token_id:{token}" if by_id else self.model.names[token]: values[token] for token in kept}

    def classify(self, body: Any, odd: Any) -> Any:
        (text,) = body["input"]
        probs = self.model.logits(self.model.ids(text)).softmax(-1).tolist()
        label = self.model.labels[probs.index(max(probs))]
        return {"data": [{"label": label, "probs": probs, "num_classes": len(probs)}]}

    def answer(self, status: int, content: Any, headers: Any = ()) -> None:
        is_json = not isinstance(content, str | bytes)
        data = (
            json.dumps(content).encode()
            if is_json
            else content
            if isinstance(content, bytes)
            else content.encode()
        )
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing: a pipe that nobody reads would fill up."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    Handler.folder = arguments.folder
    has_model = (arguments.folder / "model").is_dir()
    Handler.model = Checkpoint(arguments.folder / "model") if has_model else Toy(arguments.folder)
    with Server(("127.0.0.1", arguments.port), Handler) as server:
        print("listening", server.server_address[1], flush=True)  # noqa: T201
        server.serve_forever()


if __name__ == "__main__":
    main()
