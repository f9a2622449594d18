"""Ask a server about rows, several at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.shards import CACHE_FOLDER
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.published_table import PublishedTable
from ensemble.data.template import compile_template
from ensemble.members.endpoint.labels import Answer, LabelScorer
from ensemble.members.endpoint.server import RowRefused, Server
from ensemble.members.predictor import Prediction, Predictor, Report

_POLL_SECONDS = 1.0


def import_libraries() -> Mapping[str, str]:
    return {"httpx": httpx.__version__, "numpy": np.__version__}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    return EndpointPredictor(common, settings, table)


class EndpointPredictor(Predictor):
    """Ask a server, which it starts itself where the settings say so."""

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> None:
        self._common, self._settings, self._table = common, settings, table
        self._template = compile_template(settings["prompt_template"])
        self._threads = ThreadPoolExecutor(settings["max_concurrency"])

    def load(self) -> Ready:
        cache = Path(self._common.shards_dir, self._common.jobs[0].folder, CACHE_FOLDER)
        self._server = Server(self._settings, cache / f"server-{os.getpid()}")
        self._server.wait_until_ready()
        self._scorer = LabelScorer(self._server, self._settings, self._common.labels)
        self._scorer.prepare()
        return Ready(device="GPU" if self._common.gpus else "cpu")

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        values = np.full((len(rows), len(self._common.labels)), np.nan)
        bad_rows: dict[int, str] = {}
        table_rows = enumerate(self._table.take(rows))
        places = {self._threads.submit(self._score, cells): place for place, cells in table_rows}
        waiting, is_wanted, other_mass = {*places}, True, 0.0
        while waiting and is_wanted:
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                try:
                    values[places[future]], mass = future.result()
                    other_mass += mass
                except RowRefused as error:
                    bad_rows[places[future]] = str(error)
            is_wanted = report(len(rows) - len(waiting)) is not False
        for future in waiting:
            future.cancel()
        counters = Counters(batches=len(places), other_mass=other_mass)
        return Prediction(values, bad_rows, counters, is_partial=bool(waiting))

    def close(self) -> None:
        self._server.end()

    def _score(self, cells: Mapping[str, object]) -> Answer:
        """Return the answer for a row, in a thread; raise what ``LabelScorer`` raises."""
        try:
            prompt = self._template.render(cells)
        except TemplateProblem as error:
            raise RowRefused(f"prompt_template: {error}") from None
        return self._scorer.score(prompt)
