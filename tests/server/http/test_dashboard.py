"""`cluster/grafana.json`: its queries are about metrics that a server has, and Prometheus answers
them."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.programs import running
from support.server_process import ServerProcess
from support.system_packages import require
from support.waiting import wait_until

from server.http.openai_door import Door

DASHBOARD = json.loads((Path(__file__).parents[3] / "cluster" / "grafana.json").read_text())
WAIT_S = 60.0
VARIABLES = {"$__rate_interval": "10s", "$model": ".*", "$instance": ".*"}
MAY_BE_EMPTY = ("requests_refused", "changes(", "spec_decode")
"""Parts of queries that have samples only after a refusal, a recovery or a draft."""


def queries() -> dict[str, str]:
    """The expressions of all panels and annotations, with the legends of their samples."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    marks = {mark["expr"]: "" for mark in DASHBOARD["annotations"]["list"]}
    return {target["expr"]: target["legendFormat"] for target in targets} | marks


def test_it_can_be_imported() -> None:
    """Every source of data is the variable that a user chooses, and no other variable is used."""
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "model", "instance"]
    sources = set(re.findall(r'"uid": "(.*?)"', json.dumps(DASHBOARD)))
    assert sources == {"${datasource}", DASHBOARD["uid"]}
    assert {*re.findall(r"\$\{?(\w+)", " ".join(queries()))} <= {*names, "__rate_interval"}


def test_its_metrics_exist(server: ServerProcess) -> None:
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_S) as answer:
        exported = set(re.findall(r"tpengine:\w+", answer.read().decode()))
    for query in [*queries(), *(str(variable) for variable in DASHBOARD["templating"]["list"])]:
        names = set(re.findall(r"tpengine:\w+", query))
        assert names or "'datasource'" in query
        assert names <= exported, query


@pytest.mark.check
def test_prometheus_answers_its_queries(server: ServerProcess, door: Door, tmp_path: Path) -> None:
    program = require("prometheus", "prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    target = server.metrics_url.split("/")[2]
    jobs = [{"job_name": "tpengine", "static_configs": [{"targets": [target]}]}]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (tmp_path / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    assert door.whole("completions", {"prompt": [5, 6, 7], "max_tokens": 5})
    command = [program, f"--config.file={tmp_path / 'config.yml'}"]
    command += [f"--web.listen-address={address}", f"--storage.tsdb.path={tmp_path / 'data'}"]

    def ask(query: str) -> list[Any]:
        """The samples of a query at this moment."""
        url = f"http://{address}/api/v1/query?query={quote(query)}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            series: list[Any] = json.load(answer)["data"]["result"]
        return series

    def has_samples() -> bool:
        try:
            return bool(ask("count_over_time(tpengine:engine_epoch[10s]) >= 3"))
        except OSError:  # it starts
            return False

    with (tmp_path / "log").open("wb") as log, running(*command, stdout=log, stderr=log):
        wait_until(has_samples, WAIT_S, more=(tmp_path / "log").read_text)
        for query, legend in queries().items():
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            series = ask(query)
            assert series or any(part in query for part in MAY_BE_EMPTY), query
            labels = set(re.findall(r"{{(\w+)}}", legend))
            assert all(labels <= line["metric"].keys() for line in series), query
