"""Describe a model behind a server on the parent's side, which asks nobody."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ensemble.common.digests import FileDigests
from ensemble.common.logged_command import command_problems
from ensemble.common.packages import installed_versions
from ensemble.common.python_process import environment_of_commands
from ensemble.config import MemberConfig, ReaderConfig, StrictConfig
from ensemble.config.document import Problem
from ensemble.config.values import (
    Count,
    Devices,
    LabelMap,
    MustBe,
    Settings,
    Text,
    TimeLimit,
    same_label_problems,
)
from ensemble.members.base import Assigned, Inspection, MemberKind, OutputColumns, Reads, ResourceRequest
from ensemble.members.huggingface.checkpoint.hub import how_to_install
from ensemble.members.prompts import LabelTokens, broken_label_tokens, space_warnings

# Rows of a chunk for each request at a time, so that the wait for a chunk's last rows costs little.
_ROUNDS_OF_CHUNK = 16
# Keys on which predictions depend. Where the server listens, and how often it is asked at a time, changes none.
_KEYS = set("model api prompt_template label_tokens length_normalize label_map extra_body".split())

Url = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$", strip_whitespace=True),
    MustBe("the address of an API, such as http://localhost:8000/v1"),
]
ServerCommand = Annotated[tuple[Text, ...], MustBe("a list of a program and its arguments", list)]


class ServerConfig(StrictConfig):
    """A server that the member's worker starts on its devices, asks, and ends with all that it started."""

    # A program and its arguments; {port} is a free port of this machine, on which it must listen.
    command: ServerCommand = Field(examples=['[vllm, serve, models/qwen, --port, "{port}"]'])
    ready: Text = "/health"  # path that answers with status 200 once the server can be asked
    ready_timeout: TimeLimit = 1800.0  # the most time until then

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if not any("{port}" in word for word in self.command):
            yield ("command",), "does not say {port}, which stands for the port to listen on; pass it on"


class EndpointSettings(ReaderConfig):
    """A model behind a server with OpenAI's interface, such as vLLM, SGLang, llama.cpp or a hosted one."""

    task_type: Literal["endpoint"] = "endpoint"
    # Of a server that runs already.
    url: Url | None = Field(default=None, examples=["http://localhost:8000/v1"])
    server: ServerConfig | None = None  # or a server that the member starts itself
    model: Text = Field(examples=["qwen"])  # the model's name at the server
    # completions: the label's text follows the prompt; chat: the prompt is the user's message, and the label begins
    # the answer; classify: a classifier in vLLM, which gives a probability for each label.
    api: Literal["completions", "chat", "classify"] = "completions"
    prompt_template: Text = Field(
        examples=['"{{ text }}"']
    )  # prompt as a Jinja template over the row's columns
    # The text of each label that follows the prompt, with the space before it where there is one.
    label_tokens: LabelTokens = Field(default_factory=dict, examples=["{pos: ' good', neg: ' bad'}"])
    # What a text's log-probability is divided by: nothing, its number of tokens, or its length in UTF-8 bytes.
    length_normalize: Literal["none", "tokens", "bytes"] = "none"
    # Of classify: the server's label -> the config's, in the server's order.
    label_map: LabelMap = Field(default_factory=dict)
    top_logprobs: Count = 20  # likeliest tokens to ask for, where the server does not take the labels' tokens
    # Further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}.
    extra_body: Settings = Field(default_factory=dict)
    api_key: Text | None = Field(default=None, examples=["${OPENAI_API_KEY}"])  # sent as a bearer token
    max_concurrency: Count = 16  # requests at a time, of each replica
    timeout: TimeLimit = 300.0  # for each request
    num_gpus: Devices = 0  # of the server, for each replica; 0: the CPU
    replicas: Count = 1  # workers that share the rows, each with a server of its own

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("url", "server"),)
    older_keys: ClassVar[Mapping[str, str]] = {"url": "base_url", "model": "model_name_or_path"}

    @property
    def label_behind_prompt(self) -> str:
        return next(iter(self.label_tokens.values()), "") if self.api == "completions" else ""

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if (self.url is None) == (self.server is None):
            yield (), "give one of url (a server that runs already) and server (one that the member starts)"
        if self.server is None and self.num_gpus:
            yield ("num_gpus",), "a server at a url has its own devices; drop this, or start it with server"
        if self.api == "classify":
            if self.label_tokens:
                yield ("label_tokens",), "a classifier has no label texts; drop this, or choose another api"
            yield from same_label_problems("label_map", self.label_map, labels)
            if self.label_map and labels and len(self.label_map) < len(labels):
                yield ("label_map",), "lacks some of the labels; name all, in the order of the server's"
            return
        if self.label_map:
            yield ("label_map",), "needs api: classify"
        yield from broken_label_tokens(self.label_tokens, labels)


class Endpoint(MemberKind[EndpointSettings, Inspection]):
    """Describe a model behind a server."""

    Settings: ClassVar[type[MemberConfig]] = EndpointSettings
    child: ClassVar[str] = "ensemble.members.endpoint.child"

    def request(self) -> ResourceRequest:
        model = self.settings
        return ResourceRequest(
            num_gpus=model.num_gpus,
            replicas=model.replicas,
            chunk_rows=_ROUNDS_OF_CHUNK * model.max_concurrency,
            gpu_memory="all",
        )

    def reads(self) -> Reads:
        return Reads(template=self.settings.prompt_template)

    def inspect(self, columns: OutputColumns) -> Inspection:
        model = self.settings
        return Inspection(
            activation="softmax",
            label_order=tuple(range(len(columns.labels))),
            summary=f"{model.model} at {model.url or 'a server of its own'}, {model.api}",
        )

    def problems(self, inspected: Inspection | None) -> Iterator[str]:
        if not installed_versions(["httpx"]):
            yield f"task_type: needs the package httpx, which is not installed: {how_to_install('httpx')}"
        if self.settings.server is not None:
            for problem in command_problems(self.settings.server.command, ["port"]):
                yield f"server.command: {problem}"

    def prompt_warnings(self, prompt: str) -> Iterator[str]:
        texts = self.settings.label_tokens.values() if self.settings.label_behind_prompt else ()
        yield from space_warnings(prompt, texts)

    def packages(self, inspected: Inspection | None) -> Iterator[tuple[str, str]]:
        yield "httpx", ".task_type"

    def fingerprint(self, inspected: Inspection, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            **model.model_dump(include=_KEYS),
            "label_map": [*model.label_map.items()],  # their order counts
            "server.command": None if model.server is None else model.server.command,
        }

    def content(self, inspected: Inspection, files: FileDigests) -> Mapping[str, str]:
        return {}

    def worker_settings(
        self, inspected: Inspection, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model = self.settings
        return {
            **model.model_dump(exclude={"views", "when", "calibration", "weight"}, mode="json"),
            "environment": environment_of_commands(),
        }
