"""Ranks that are forked from a template: what they are, and what its end and theirs leave."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.leftovers import nothing_left
from support.namespaces import children_of
from support.waiting import PATIENCE_S, wait_until

from executor.bare_ranks import BareRanks, bare_ranks
from tpengine.errors import PlacementError
from tpengine.executor.launch import processes, template, template_process
from tpengine.executor.launch.children import Child, Starter
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.launch.processes import RankProcess
from tpengine.executor.launch.template import Template

MODEL_CODE = ("tpengine", None)
PROGRAM = "tpengine.executor.launch.rank_process"


@pytest.fixture
def starter(folder: Path) -> Iterator[Starter]:
    """With the folder, as then this process's own template (`support.forked`) has begun."""
    starter = Starter()
    yield starter
    starter.stop()


def ready_template(starter: Starter) -> Template:
    source = Template(starter, MODEL_CODE, lambda _: None)
    wait_until(source.is_prepared)
    return source


def forked(source: Template) -> RankProcess:
    return RankProcess("rank 0", lambda ends: source.fork(PROGRAM, ends))


def end(child: Child) -> None:
    child.end()
    wait_until(lambda: child.exit_status() is not None)


def the_template(ranks: BareRanks) -> Template:
    """Of these ranks, once it can fork."""
    home: Any = ranks.executor.home
    wait_until(lambda: [spare.is_prepared() for spare in home.spares.usable()] == [True])
    return home.spares.usable()[0]  # type: ignore[no-any-return]


def test_what_is_forked(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of this process with its own session, variables, descriptors and random numbers."""
    monkeypatch.setenv("TPENGINE_TEST_FORK", "set after the template's start")
    all_facts, source = [], ready_template(starter)
    monkeypatch.setenv("TPENGINE_TEST_FORK", "as it is now")
    for _ in range(2):
        own, end = socket.socketpair()
        process = source.fork("executor.forked_facts", [end])
        with closing(own), process.stdout as output:
            assert end.fileno() == -1
            all_facts.append(json.loads(output.read()))
        assert process.wait(PATIENCE_S) == 5
    for facts in all_facts:
        driver, channel = map(int, facts.pop("arguments"))
        assert driver == facts.pop("parent") == os.getpid()
        assert channel > 2
    assert all_facts[0].pop("random") != all_facts[1].pop("random")
    assert all_facts[0] == all_facts[1]
    assert all_facts[0] == {
        "leads its session": True,
        "the C library knows its number": True,
        "Ctrl-C ends it": True,
        "input": os.devnull,
        # As the template has: the channel is in the place of the socket for orders.
        "open": len(os.listdir(f"/proc/{source.pid}/fd")),
        "variable": "as it is now",
        "threads of numpy": None,
        "torch is there": True,
    }
    source.end()


def test_a_lost_rank_is_forked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss has its cause; no interpreter is started; nothing is left at the end."""
    with nothing_left(), bare_ranks(folder, 2, spare_workers=2) as ranks:
        expected, first = ranks.generate(), the_template(ranks)
        monkeypatch.delattr(Starter, "start_process")
        assert ranks.lose(1).cause == "killed by signal 9 (SIGKILL)"
        ranks.rebuild()
        assert ranks.generate() == expected
        assert the_template(ranks) is first
        assert first.pid not in [place.pid for place in ranks.executor.places]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_template_that_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Its ranks go on. The next ranks need none, and there is another one then."""
    monkeypatch.setattr(processes, "_RENEW_S", 0.0)
    with bare_ranks(folder, 2) as ranks:
        expected, first = ranks.generate(), the_template(ranks)
        places = ranks.executor.places
        os.kill(first.pid, number)
        wait_until(lambda: first.answer() is None)
        assert ranks.generate() == expected
        assert all(NodeAgent.state(place.process) for place in places)
        ranks.lose(0)
        ranks.rebuild()
        assert ranks.generate() == expected
        second = the_template(ranks)
        assert second is not first
        wait_until(lambda: first.exit_status() == signal.SIGKILL)


def test_a_template_that_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose imports start threads: ranks are interpreters of their own from then on."""
    over = threading.Event()
    threading.Thread(target=over.wait, args=[PATIENCE_S]).start()
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "import_all", lambda _: None)
        nothing = SimpleNamespace(disable=int, freeze=int, enable=int)
        patch.setattr(template_process, "gc", nothing)
        answer = template_process._prepare(MODEL_CODE)
        over.set()
        assert "threads" in answer["refusal"]
    monkeypatch.setattr(Template, "refusal", answer["refusal"])
    with bare_ranks(folder, 1) as ranks:
        assert len(ranks.generate()) == 16
        assert not ranks.executor.home.spares.count
        ranks.lose(0)
        ranks.rebuild()
        assert not ranks.executor.home.spares.usable()


def test_a_template_that_is_killed_while_it_forks(starter: Starter) -> None:
    """Its caller gets an error or a process, and no process is left that it does not know."""
    rng = random.Random(0)
    for _ in range(8):
        with nothing_left():
            source = ready_template(starter)
            threading.Timer(rng.uniform(0.0, 0.03), source._process.kill).start()
            with suppress(PlacementError):
                end(forked(source))
            end(source)


def test_a_fork_that_answers_late(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended before another process gets the same channels."""
    source, receive = ready_template(starter), Template._receive
    children = children_of(os.getpid())

    def late(_: Template, timeout_s: float) -> Any:
        wait_until(lambda: len(children_of(os.getpid())) > len(children))
        monkeypatch.setattr(Template, "_receive", receive)
        raise TimeoutError

    def start(ends: Any) -> Any:
        with pytest.raises(TimeoutError):
            source.fork(PROGRAM, ends)
        assert set(children_of(os.getpid())) <= set(children)
        raise OSError("no other way")

    monkeypatch.setattr(Template, "_receive", late)
    with pytest.raises(PlacementError, match="no other way"):
        RankProcess("rank 0", start)


def test_a_rank_is_reaped(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is stopped; and a template that is stopped does not hold its caller up."""
    source = ready_template(starter)
    rank = forked(source)
    os.kill(rank.pid, signal.SIGSTOP)
    wait_until(lambda: rank.answer() is None)
    end(rank)
    assert not Path(f"/proc/{rank.pid}").exists()
    os.kill(source.pid, signal.SIGSTOP)
    monkeypatch.setattr(template, "_ANSWER_S", 0.1)
    with pytest.raises(PlacementError, match="timed out"):
        forked(source)
    wait_until(lambda: source.exit_status() == signal.SIGKILL)
    source.end()
