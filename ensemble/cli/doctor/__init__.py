"""Whether a run could start here: the whole of ``doctor``.

Others use ``examine`` and the findings it gives, and nothing else inside.  Nothing here imports torch or changes
anything; what only torch can tell is asked of test processes (``trials``, ``ensemble.worker.probe``).  The config
and what it needs are imported when there is a config: a machine that lacks pydantic shall hear so in a sentence.
"""

from __future__ import annotations

from ensemble.cli.doctor.checks import examine
from ensemble.cli.doctor.finding import Finding

__all__ = ["Finding", "examine"]
