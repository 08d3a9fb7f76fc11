"""Fixtures that all test rooms share."""

from __future__ import annotations

import os

# Small models gain nothing from a second thread, and where other processes want the cores two
# threads wait for each other. Before torch is imported, as is `tpengine`, which bounds the waiting.
os.environ.setdefault("TPENGINE_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tpengine  # noqa: F401

# isort: split

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support import forked
from support.event_loop import pytest_pyfunc_call  # noqa: F401  # for tests that are coroutines
from support.gpu_walk import walk  # noqa: F401  # a fixture
from support.hub import hub, opt  # noqa: F401  # fixtures
from support.models import ModelShop
from support.oracle import Oracle
from support.programs import cli  # noqa: F401  # a fixture
from support.ray_cluster import ray_address  # noqa: F401  # a fixture
from support.servers import llm, seeing, seeing_llm, server, tight  # noqa: F401  # fixtures
from support.small_llamas import make_engine  # noqa: F401  # a fixture
from support.subjects import Subjects

from tpengine.config import EMBEDDED_MODEL

# A shell starts background commands with SIGINT ignored; Python then sets no handler itself.
signal.signal(signal.SIGINT, signal.default_int_handler)

_LONG_ROOMS = ("executor", "server", "recovery/on_ray", "distributed")
"""Their files stay together, as they share a Ray cluster, servers or ranks; they come first."""

_WAITS = "tests/server/http/test_proxies.py"
"""For more than a minute, until a proxy would lose patience: first of all, and by itself."""

_MAY_SKIP = (
    "this kernel gives no large pages",
    "the memory is too fragmented for large pages now",
    "this kernel populates no memory when asked",
    "this kernel does not tell which pages have memory",
    "are torch's own here",  # this CPU has no AVX-512 of the kind that the test needs
    "there is a CUDA device",
    "needs a machine without a GPU",
)
"""Reasons for which a test may skip itself in CI: no installed package can give these things."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `make test` and `make check`, which run several pytests: the longest first."""
    first = {group: place for place, group in enumerate((_WAITS, *_LONG_ROOMS))}
    items.sort(key=lambda item: first.get(_group_of(item.nodeid), len(first)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has programs forked where tests start many, unless this process is itself a fork."""
    starts_many = any(_group_of(item.nodeid) in _LONG_ROOMS for item in session.items)
    if starts_many and _forks(session.config) and not forked.is_started():
        forked.start()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Has the processes of `-n` forked."""
    if _forks(config):
        forked.start()


def _forks(config: pytest.Config) -> bool:
    """`make check` and `make soak` execute what they start, which finds a missing import."""
    return config.getoption("markexpr") in ("", "not soak and not check")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who stays together: the long rooms, and otherwise files.

    xdist's own `xdist_group` writes into an attribute that items of pytest 9 do not have: every
    test is its own group then, and all that they share is made in each process.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Makes a failure of a skip where `TPENGINE_TEST_REQUIRE_TOOLS` is 1, as in CI."""
    if os.environ.get("TPENGINE_TEST_REQUIRE_TOOLS") != "1" or not report.skipped:
        return
    if hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if any(allowed in reason for allowed in _MAY_SKIP):
        return
    report.outcome = "failed"
    report.longrepr = f"a test may not skip itself here (TPENGINE_TEST_REQUIRE_TOOLS=1): {reason}"


def _group_of(nodeid: str) -> str:
    """The long room or the file of a test, as `tests/server/test_client.py::test_commands`."""
    file = nodeid.partition("::")[0]
    if file == _WAITS:
        return file
    inside = file.removeprefix("tests/").replace("client/", "server/", 1)  # they share servers
    return next((room for room in _LONG_ROOMS if inside.startswith(f"{room}/")), file)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelShop:
    return ModelShop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    """Every variant of `support.variants`, each made when it is first asked for."""
    return Subjects(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def embedded_oracle(models: ModelShop) -> Oracle:
    return models.oracle(EMBEDDED_MODEL)
