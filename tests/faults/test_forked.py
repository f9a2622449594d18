"""A run from the fork server makes what a run of fresh processes makes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoints import reference
from tests.faults.chunky import results, values
from tests.faults.forked.runs import ForkedRuns
from tests.project import Project


@pytest.mark.long
def test_fresh_processes_make_the_same_bytes(
    chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    done = chunky.ensemble("run", "config.yaml", environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert results(chunky) == undisturbed
    expected = reference(chunky.models / "llama", chunky.texts, max_length=16)
    np.testing.assert_allclose(values(chunky, "predictions/llama"), expected, atol=1e-5)
    (member,) = chunky.run_json()["members"]
    assert (member["chunks"], member["counters"]["rows"]) == (4, 16)
