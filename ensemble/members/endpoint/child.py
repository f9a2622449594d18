"""Ask a server about rows, several at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.shards import CACHE_FOLDER
from ensemble.data.json_cells import TemplateProblem, replace_lone_surrogates
from ensemble.data.published_table import PublishedTable
from ensemble.data.template import compile_template
from ensemble.members.endpoint.scoring.client import Client, RowRefused, Stopped
from ensemble.members.endpoint.scoring.labels import Answer, LabelScorer
from ensemble.members.endpoint.scoring.server import Server
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
        templates = [template or settings["prompt_template"] for template in settings["job_templates"]]
        self._templates = [None if source is None else compile_template(source) for source in templates]
        self._template = self._templates[0]
        self._threads = ThreadPoolExecutor(settings["max_concurrency"], "requests")
        self._server: Server | None = None

    def load(self) -> Ready:
        url = self._settings["url"]
        if self._settings["server"] is not None:
            cache = Path(self._common.shards_dir) / self._common.jobs[0].folder / CACHE_FOLDER
            self._server = Server(self._settings, cache / f"server-{os.getpid()}")
            url = self._server.url
        self._client = Client(url, self._settings, self._server)
        if self._server is not None:
            self._server.wait_until_ready(self._client.is_ready)
        self._scorer = LabelScorer(self._client, self._settings, self._common.labels)
        self._scorer.prepare()
        return Ready(device="GPU" if self._common.gpus else "cpu")

    def use_job(self, job: int) -> None:
        self._template = self._templates[job]

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        values = np.full((len(rows), len(self._common.labels)), np.nan)
        bad_rows: dict[int, str] = {}
        places: dict[Future[Answer], int] = {}
        for place, cells in enumerate(self._table.take(rows)):
            try:
                places[self._threads.submit(self._scorer.score, self._prompt(cells))] = place
            except TemplateProblem as error:
                bad_rows[place] = f"prompt_template: {error}"
        waiting, is_stopped, tokens, other_mass = set(places), False, 0, 0.0
        try:
            while waiting:
                done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    try:
                        answer = future.result()
                    except RowRefused as error:
                        bad_rows[places[future]] = str(error)
                    except (LookupError, TypeError, AttributeError) as error:
                        form = f"{type(error).__name__}: {error}"
                        bad_rows[places[future]] = (
                            f"the server answers in another form than OpenAI's ({form})"
                        )
                    except Stopped:
                        continue
                    else:
                        values[places[future]] = answer.values
                        tokens += answer.tokens
                        other_mass += answer.other_mass
                is_stopped = report(len(rows) - len(waiting), tokens, tokens) is False
                if is_stopped:  # rows that are asked already are paid for
                    self._client.is_stopped.set()
                    waiting = {future for future in waiting if not future.cancel()}
        finally:
            for future in waiting:
                future.cancel()
        counters = Counters(batches=len(places), tokens=tokens, padded_tokens=tokens, other_mass=other_mass)
        return Prediction(values, bad_rows, counters, is_partial=is_stopped)

    def close(self) -> None:
        if self._server is not None:
            self._server.end()

    def _prompt(self, cells: Mapping[str, object]) -> str:
        if self._template is not None:
            return self._template.render(cells)
        cell = cells[self._settings["text_column"]]
        return "" if cell is None else replace_lone_surrogates(str(cell))
