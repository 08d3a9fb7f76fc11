"""What an engine does while its ranks are replaced, and how it ends when they cannot be."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import refused

from tpengine import LLM, RequestOutputKind, SamplingParams, errors
from tpengine.cli.main import main
from tpengine.config import EngineConfig
from tpengine.engine import llm_engine, recovery
from tpengine.engine.stats import EngineState
from tpengine.executor.channel import ChannelError
from tpengine.server.http.page import describe
from tpengine.server.state import ServerState, State

from .client import Client, Job, open_client, serve, summary
from .conftest import MakeConfig
from .mortal import FakeGroup, Fate, MortalExecutor


def job(number: int, max_tokens: int = 10, num_prompt_tokens: int = 5) -> Job:
    prompt = [3 + (31 * number + 7 * place) % 900 for place in range(num_prompt_tokens)]
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, seed=number, output_kind=RequestOutputKind.DELTA
    )
    return Job(prompt, params)


def alone(config: EngineConfig, number: int) -> list[tuple[Any, ...]]:
    """What an undisturbed engine answers to this job."""
    return summary(serve(config, [job(number)]).answers["0"])


@pytest.fixture
def client(fake_config: MakeConfig) -> Iterator[Client]:
    """An engine with three running requests."""
    client = open_client(fake_config(max_recoveries=3), [job(number) for number in range(3)])
    for _ in range(3):
        client.step()
    with client.engine:
        yield client


def lose(client: Client) -> None:
    """Loses the group; the next one is not ready until the test opens the gate."""
    client.executor.gate.clear()
    client.executor.lose()
    assert client.step() == []
    assert client.engine.health().state is EngineState.RECOVERING


def test_weights_are_known_without_ranks(client: Client) -> None:
    """`stats` and `get_weights_bytes` do not call the ranks: these ranks would refuse the call."""
    before = client.engine.get_weights_bytes()
    assert before == [ledger.weights_bytes for ledger in client.engine.stats().ledgers]
    lose(client)
    assert client.engine.get_weights_bytes() == before


@pytest.mark.parametrize("keeps_memory", [False, True])
def test_a_step_returns_soon_with_aborted_requests(client: Client, keeps_memory: bool) -> None:
    engine, executor = client.engine, client.executor
    executor.fate.keeps_memory = keeps_memory
    lose(client)
    engine.abort_request("1")
    (aborted,) = client.step()
    assert (aborted.request_id, aborted.outputs[0].finish_reason) == ("1", "abort")
    client.add("late", job(7))
    client.add("gone", job(8))
    engine.abort_request(["gone", "never there"])
    assert [output.request_id for output in client.step()] == ["gone"]
    start = time.monotonic()
    assert all(client.step() == [] for _ in range(5))
    assert time.monotonic() - start > 0.05  # a step waits a little, but not for the group
    assert engine.get_num_unfinished_requests() == 3
    assert keeps_memory or engine.num_free_blocks == engine.num_total_blocks
    assert executor.epoch == 1
    executor.gate.set()
    answers = client.run()
    assert executor.epoch == 2
    assert executor.threads == {"tpengine-rebuild"}
    assert [record.is_resumed for record in engine.recoveries] == [keeps_memory]
    for name, number in (("0", 0), ("2", 2), ("late", 7)):
        assert summary(answers[name]) == alone(executor.config, number)
    assert len(answers["1"].token_ids[0]) == 3


def test_health(client: Client) -> None:
    engine, executor = client.engine, client.executor
    health = engine.health()
    assert (health.state, health.epoch, health.num_recoveries) == (EngineState.RUNNING, 1, 0)
    assert health.recovery is None
    lose(client)
    time.sleep(0.1)
    health = engine.health()
    assert health.recovery.loss is executor.losses[-1]
    assert health.stalled_s >= 0.1
    executor.gate.set()
    client.run()
    health = engine.health()
    assert (health.state, health.epoch, health.num_recoveries) == (EngineState.RUNNING, 2, 1)
    (record,) = engine.recoveries
    assert record.ready_s >= 0.1
    assert record.longest_gap_s >= 0.1
    assert (record.epoch, record.num_requests, record.num_attempts) == (2, 3, 1)
    time.sleep(0.1)
    assert engine.health().stalled_s == 0.0  # idle is not stalled,
    start = time.monotonic()
    client.add("next", job(5))
    stalled_s = engine.health().stalled_s
    assert stalled_s <= time.monotonic() - start  # and neither is a request that has just come
    time.sleep(0.1)
    assert engine.health().stalled_s >= 0.1


def test_what_the_page_shows_of_a_recovery(client: Client) -> None:
    """Who was lost and why, without stack and log; and the state of each rank."""
    state = ServerState(["some"], 1.0)
    engine: Any = SimpleNamespace(stats=client.engine.stats, llm_engine=client.engine)
    state.engine, state.state = engine, State.RUNNING

    def told() -> Any:
        status = describe(state)
        return json.loads(json.dumps(status)), [rank["state"] for rank in status["engine"]["ranks"]]

    status, ranks = told()
    assert (status["state"], ranks) == ("running", ["running", "running"])
    lose(client)
    status, ranks = told()
    assert (status["state"], ranks) == ("recovering", ["ended", "lost"])
    recovery = status["engine"]["recovery"]
    assert recovery["loss"]["rank"] == 1
    assert recovery["loss"]["cause"] == "killed by signal 9 (SIGKILL)"
    assert (recovery["num_attempts"], recovery["phases_s"]) == (1, {"weights": 0.25})
    assert status["engine"]["queues"]["num_waiting"] == 3
    client.executor.gate.set()
    client.run()
    status, ranks = told()
    assert (status["engine"]["recovery"], ranks) == (None, ["running", "running"])
    (record,) = status["engine"]["recoveries"]
    assert (record["epoch"], record["num_requests"], record["loss"]["rank"]) == (2, 3, 1)
    assert not {"stack", "last_lines"} & {*record["loss"], *recovery["loss"]}


def test_a_loss_while_idle_is_repaired_before_the_next_request(client: Client) -> None:
    client.run()
    client.executor.lose()
    client.recover()
    assert client.engine.health().epoch == 2
    client.add("after", job(9))
    assert summary(client.run()["after"]) == alone(client.executor.config, 9)


def test_a_request_that_no_longer_fits_fails_alone(fake_config: MakeConfig) -> None:
    fate = Fate(kills=frozenset({3}), blocks=[(20, 0), (5, 0)])
    jobs = [job(0, num_prompt_tokens=45), job(1), job(2, max_tokens=40)]
    served = serve(fake_config(), jobs, fate)
    answers, engine = served.answers, served.engine
    assert engine.num_total_blocks == 5
    for name in "02":
        assert answers[name].reasons == {"length"}
        assert "the KV cache has 5, which hold 40 tokens" in str(answers[name].error)
    assert len(answers["2"].token_ids[0]) > 30
    assert summary(answers["1"]) == alone(fake_config(), 1)
    assert engine.recoveries[0].num_blocks == (20, 5)


def test_used_up(client: Client) -> None:
    """The engine recovers three times; the error of the fourth loss holds all that is known."""
    engine, executor = client.engine, client.executor
    for _ in range(3):
        executor.lose()
        client.recover()
    executor.lose("idle")
    limits, place = "max_recoveries = 3 | 600 s", "rank 1 | 10.0.0.7 | pid 4711 | epoch 4"
    cause = "idle | SIGKILL | these were its last words | File worker.py"
    with refused(errors.EngineDeadError, f"{limits} | {place} | {cause}") as raised:
        client.step()
    assert isinstance(raised.value.__cause__, errors.GroupLostError)
    assert executor.is_shut_down.is_set()
    assert engine.health().state is EngineState.DEAD
    with pytest.raises(errors.EngineDeadError, match="max_recoveries = 3"):
        engine.step()
    with pytest.raises(errors.EngineDeadError, match="max_recoveries = 3"):
        client.add("late", job(4))
    assert executor.epoch == 4


def test_old_losses_do_not_count(fake_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(max_recoveries=1, recovery_window=1.0)
    client = open_client(config, [job(0, max_tokens=20)])
    now = 0.0
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(3):
        now += 1.05
        client.executor.lose()
        client.recover()
    now += 0.9
    client.executor.lose()
    with client.engine, pytest.raises(errors.EngineDeadError, match=r"lost 2 times within 1 s"):
        client.recover()


class Clock:
    """In place of the module `time` of recoveries: each sleep takes a second."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recovery, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_groups_that_die_during_their_start(fake_config: MakeConfig) -> None:
    """They do not count as losses: only the group that was ready does."""
    fate = Fate(frozenset({4}), deque(["rebuild", "cache", "rebuild"]))
    served = serve(fake_config(max_recoveries=1), [job(number) for number in range(3)], fate)
    for number in range(3):
        assert summary(served.answers[str(number)]) == alone(fake_config(), number)
    (record,) = served.engine.recoveries
    assert (record.num_attempts, record.epoch) == (4, 5)
    phases = [loss.phase for loss in served.executor.losses]
    assert phases == ["execute_model", "rebuild", "cache", "rebuild"]


LACKS = {
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "files": OSError(errno.EMFILE, "Too many open files"),
    "memory": MemoryError("no memory for a thread"),
    "ports": ChannelError("cannot listen on 10.0.0.1: Address already in use"),
    "places": errors.PlacementError("no room on the Ray cluster"),
    "shared memory": errors.SharedMemoryError("2 ranks need 6.0 MiB"),
    "threads": RuntimeError("can't start new thread"),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_may_pass_is_tried_again(client: Client, clock: Clock, name: str) -> None:
    """At a pace that leaves the machine time: after 1, 2, 4 and at most 30 seconds. It counts as no
    loss: the client's engine may have three."""
    client.executor.fate.rebuilds += [LACKS[name]] * 8
    client.executor.lose()
    client.recover()
    at = client.executor.attempted_at
    assert [later - earlier for earlier, later in itertools.pairwise(at)] == pytest.approx(PAUSES)
    assert client.engine.recoveries[0].num_attempts == 9
    assert summary(client.run()["0"]) == alone(client.executor.config, 0)


PAUSES = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_start_that_fails_is_reported(
    client: Client, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """With what the machine may lack, after each attempt and at the end: 600 s after the loss. Of a
    reason that stays the same only the first line is told again."""
    failure = ChannelError("cannot make a log\nRay says: 0d1e is dead")
    failure.__cause__ = LACKS["disk"]
    client.executor.fate.rebuilds += [failure] * 100
    client.executor.lose()
    start = clock.now
    end = "recovery_timeout = 600 s | attempts. The last one:  | rank 1 | SIGKILL"
    with caplog.at_level(logging.ERROR), refused(errors.EngineDeadError, end) as raised:
        client.recover()
    assert 560.0 < clock.now - start <= 600.0
    [line] = [x for x in caplog.messages if x.startswith("attempt 3 at a new group")]
    assert line.index("MiB free") < line.index("ChannelError")
    assert sum("Ray says: 0d1e is dead" in message for message in caplog.messages) == 1
    for text in (line, str(raised.value)):
        for word in ("ChannelError: cannot make a log", "errno 28 (No space left on device)"):
            assert word in text
        for pattern in (r"\d+ of \d+ MiB free in /dev/shm", r"\d+ of \d+ file descriptors open"):
            assert re.search(pattern, text)
    assert client.engine.health().failure is raised.value
    assert client.executor.is_shut_down.is_set()


def test_an_attempt_that_hangs(client: Client, clock: Clock) -> None:
    """A thread in a library's call cannot be ended; the engine does not wait for it."""
    lose(client)
    clock.now += 599.0
    assert client.step() == []
    assert client.engine.health().stalled_s > 599.0
    clock.now += 2.0
    with pytest.raises(errors.EngineDeadError, match=r"recovery_timeout = 600 s.* attempt 1 hangs"):
        client.step()


def test_a_group_that_cannot_be_rebuilt(client: Client) -> None:
    client.executor.fate.rebuilds.append(errors.ModelLoadError("it is gone"))
    client.executor.lose()
    with pytest.raises(errors.EngineDeadError, match="not be replaced: ModelLoadError: it is gone"):
        client.recover()
    assert client.executor.is_shut_down.is_set()


def test_shutdown_in_the_middle_of_a_rebuild(client: Client) -> None:
    lose(client)
    client.engine.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "tpengine-rebuild"]
    with pytest.raises(errors.EngineError):
        client.recover()


def test_log_lines(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tpengine"):
        lose(client)
        client.executor.gate.set()
        client.recover()
    (lost,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    for word in ("rank 1", "pid 4711", "epoch 1", "SIGKILL", "3 requests will wait", "1 of 3"):
        assert word in lost
    (back,) = [message for message in caplog.messages if "rebuilt: epoch 2" in message]
    for word in ("(weights 0.25)", "100 blocks, 100 before; 3 requests can go on"):
        assert word in back
    assert client.engine.recoveries[0].phases_s == {"weights": 0.25}


def use_mortal_ranks(patch: pytest.MonkeyPatch, config: EngineConfig, fate: Fate) -> MortalExecutor:
    """Gives the engine that is made next this configuration and these ranks."""
    executor = MortalExecutor(config, fate, FakeGroup)
    patch.setattr(llm_engine, "create_executor", lambda args: (config, executor))
    return executor


def test_batch_and_stream_go_on(fake_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM.generate` and `LLM.stream`, and a stream that is left while the group is rebuilt."""
    use_mortal_ranks(monkeypatch, fake_config(), Fate(kills=frozenset({2, 13, 20})))
    llm = LLM()
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=5)
    prompts = [[3 + number, 4, 5] for number in range(4)]
    with llm:
        outputs = llm.generate(None, params, prompts, use_tqdm=False)
        stream = llm.stream(None, params, prompts[0])
        while engine.health().num_recoveries < 2:
            next(stream)
        stream.close()
        again = llm.generate(None, params, prompts, use_tqdm=False)
    undisturbed = serve(fake_config(), [Job(prompt, params) for prompt in prompts]).answers
    expected = [undisturbed[str(number)].token_ids[0] for number in range(4)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.outputs[0].token_ids for output in again] == expected
    assert engine.health().num_recoveries == 3


def test_the_command_line_reports_it_once(
    real_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not report it again for each prompt that is left."""
    fate = Fate(is_lethal=lambda step: True)
    executor = use_mortal_ranks(monkeypatch, real_config(max_recoveries=1), fate)
    assert main(["generate", "one", "two", "three", "--max-recoveries", "1"]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("tpengine: ")]
    assert "EngineDeadError" in line
    assert "rank 1 on 10.0.0.7 (host seven), pid 4711" in line
    assert executor.is_shut_down.is_set()
