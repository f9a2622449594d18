"""One cluster of three nodes for all tests, and nodes that may die."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sampling
from tests.faults.conftest import chunky, undisturbed
from tests.ray.nodes import SPACED, Nodes

__all__ = ["chunky", "mortal", "nodes", "undisturbed", "warm"]


@pytest.fixture(scope="package")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, nvml_libraries: Path, request: pytest.FixtureRequest
) -> Iterator[Nodes]:
    """A test that ends what is theirs has it on a node of its own (``mortal``).

    They end with the last test of this folder, because a cluster computes while nobody uses it.
    """
    if " " in sys.executable:
        pytest.skip(SPACED)
    server = request.getfixturevalue("fork_server") if sampling.part == "usual" else ""
    made = Nodes(tmp_path_factory.mktemp("nodes"), nvml_libraries, server)
    try:
        made.add("head", gpus=1)
        made.add("second", gpus=2)
        made.add("third", gpus=1)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers on nodes are forked where the usual part of the tests runs; commands, which import ray, never are."""
    if sampling.part != "usual":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FORK_SERVER", request.getfixturevalue("fork_server"))
        yield


@pytest.fixture
def mortal(nodes: Nodes) -> Iterator[str]:
    """The name of another node, with a GPU, which may come to harm."""
    name = nodes.new_name("mortal")
    nodes.add(name, gpus=1)
    try:
        yield name
    finally:
        nodes.kill(name)
