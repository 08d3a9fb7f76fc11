"""A full queue refuses at once; waiting requests are served in their order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.engines import greedy

from async_engine.conftest import MakeEngine, MakeHeld
from async_engine.tools import (
    FINAL,
    TIMEOUT_S,
    TokenizerGate,
    collect,
    last_output,
    read_ids,
    stream,
    until,
)
from tpengine import AsyncLLMEngine, errors
from tpengine.async_engine import request_table
from tpengine.async_engine.admission import Admission, QueueLimits
from tpengine.async_engine.request_table import LiveRequest, RequestTable
from tpengine.engine.requests import GenerateRequest
from tpengine.inputs import Owner
from tpengine.messages import PictureLoad, SamplingRules
from tpengine.scheduling.sequence import CheckedRequest, PromptPictures

LONG = "long " * 20_000


async def test_pixels_of_live_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "_MAX_PICTURE_BYTES", 100)
    table = RequestTable(Admission(QueueLimits()), lambda _: None, False)

    def enter(num_bytes: int) -> LiveRequest:
        live = table.open(GenerateRequest("a"), False)
        loads = {b"": PictureLoad(b"", 1, 1, 1, bytes(num_bytes))}
        pictures = PromptPictures([], loads)
        checked = CheckedRequest("a", [1], greedy(1), SamplingRules(), pictures=pictures)
        try:
            table.admit(live, checked)
        except errors.QueueFullError as error:
            table.refuse(live, error)
            raise
        return live

    first = enter(120)  # alone it is taken
    with pytest.raises(errors.QueueFullError, match="120 bytes of pixels; with 1 more"):
        enter(1)
    table.finish(first, "stop")
    assert [enter(num_bytes).num_picture_bytes for num_bytes in (60, 40)] == [60, 40]
    with pytest.raises(errors.QueueFullError, match="smaller ones"):
        enter(1)
    assert table.refused == {"QueueFullError": 2}


async def test_the_queue_bounds_tokens_too(make_held: MakeHeld) -> None:
    engine, held = make_held(QueueLimits(max_requests=100, max_tokens=50), max_num_seqs=1)
    first = asyncio.create_task(read_ids(engine, [4] * 60, stream(4)))  # no other request waits
    await held.reached(1)
    held.let(1)
    await held.reached(2)
    waiting = [asyncio.create_task(read_ids(engine, [9] * 25, stream(4))) for _ in range(2)]
    await until(lambda: engine.stats().queues.num_queued_tokens == 50)
    with pytest.raises(errors.QueueFullError, match="50 prompt tokens wait already; with 1 more"):
        await read_ids(engine, [7], stream(4))
    assert engine.stats().queues.num_queued == 2
    held.open()
    assert [len(ids) for ids in await asyncio.gather(first, *waiting)] == [4] * 3
    assert engine.stats().queues.num_queued_tokens == 0


async def test_a_refused_prompt_frees_its_place(make: MakeEngine) -> None:
    engine = make(QueueLimits(max_requests=1))
    for _ in range(3):
        with pytest.raises(errors.InvalidPromptError, match="no id of the vocabulary"):
            await read_ids(engine, [100_000], stream(4))
    assert engine.stats().queues.num_queued == 0
    assert len(await read_ids(engine, [7], stream(4))) == 4


async def test_texts_wait_in_a_bounded_queue_behind_requests(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(QueueLimits(max_requests=3))
    held = TokenizerGate(engine, monkeypatch)
    texts = [asyncio.create_task(engine.tokenize("first"))]
    await until(held.inside.is_set)
    texts += [asyncio.create_task(engine.tokenize(f"text {i}")) for i in range(2)]
    texts += [asyncio.create_task(engine.detokenize([5, 6]))]
    await asyncio.sleep(0)  # now each task runs up to its first wait
    for refused in (engine.tokenize("one more"), engine.detokenize([5])):
        with pytest.raises(errors.QueueFullError, match="3 texts wait") as caught:
            await refused
        assert caught.value.retry_after_s > 0
    request = asyncio.create_task(last_output(engine, "request", stream(2)))
    await asyncio.sleep(0)
    held.go_on.set()
    await asyncio.gather(request, *texts)
    assert held.texts == ["first", "request", "text 0", "text 1"]


async def test_the_end_of_a_request_does_not_wait_for_the_tokenizer(
    engine: AsyncLLMEngine, tokenizer_gate: TokenizerGate
) -> None:
    """One prompt is being tokenized, the others wait for the tokenizer. An abort waits for no step,
    as the engine has nothing to free."""

    def begin(request_id: str, **limits: float) -> asyncio.Task[object]:
        outputs = engine.generate("hello", greedy(3, output_kind=FINAL), request_id, **limits)
        return asyncio.create_task(collect(outputs))

    steps = engine.stats().num_steps
    aborted = begin("aborted")
    await until(tokenizer_gate.inside.is_set)
    patient = begin("patient", max_queue_s=0.01)
    late = begin("late", deadline=time.monotonic() + 0.01)
    left = begin("left")
    for task in (patient, late):
        await asyncio.wait({task}, timeout=TIMEOUT_S)
        assert isinstance(task.exception(), errors.DeadlineExceededError)
    assert engine.stats().queues.num_queued == 2
    left.cancel()
    aborting = [asyncio.create_task(engine.abort("aborted")) for _ in range(3)]
    _, waiting = await asyncio.wait([left, *aborting], timeout=TIMEOUT_S)
    assert (waiting, left.cancelled(), aborting[0].result()) == (set(), True, True)
    assert await asyncio.wait_for(aborted, TIMEOUT_S) == [], "it has no last output"
    assert engine.stats().queues.num_queued == 0
    assert not tokenizer_gate.go_on.is_set()
    tokenizer_gate.go_on.set()
    assert await engine.tokenize("hello"), "the thread goes on"
    assert engine.stats().num_steps == steps


async def test_shutdown_ends_texts(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait; the one that is being read gets its answer."""
    engine = make()
    held = TokenizerGate(engine, monkeypatch)
    first = asyncio.create_task(engine.tokenize("first"))
    await until(held.inside.is_set)
    waiting = [
        asyncio.create_task(engine.tokenize("second")),
        asyncio.create_task(last_output(engine, "third", greedy(3, output_kind=FINAL))),
    ]
    await asyncio.sleep(0)  # now each task runs up to its first wait
    await engine.shutdown()
    await asyncio.wait(waiting, timeout=TIMEOUT_S)
    assert [type(task.exception()) for task in waiting] == [errors.EngineDeadError] * 2
    for text in ("later", LONG, LONG):
        with pytest.raises(errors.EngineDeadError):
            await asyncio.wait_for(engine.tokenize(text), TIMEOUT_S)
    held.go_on.set()
    assert await asyncio.wait_for(first, TIMEOUT_S)


@pytest.mark.parametrize(
    "slow",
    [
        lambda engine: last_output(engine, LONG, stream(2)),
        lambda engine: last_output(engine, "hold", stream(2, structured_outputs={"regex": "a"})),
        lambda engine: engine.tokenize(LONG),
        lambda engine: engine.chat_token_ids([{"role": "user", "content": LONG}]),
    ],
    ids=["prompt", "grammar", "text", "chat"],
)
async def test_slow_work_keeps_no_other_waiting(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, slow: Callable[[AsyncLLMEngine], Any]
) -> None:
    engine, inside, go_on = make(), threading.Event(), threading.Event()
    tokenizer = engine.llm_engine.tokenizer
    encode = tokenizer.encode

    def hold_some(text: str, *args: Any, **kwargs: Any) -> list[int]:
        if "long" in text or text == "hold":
            inside.set()
            assert go_on.wait(TIMEOUT_S)
        return encode(text[:20], *args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", hold_some)
    held = asyncio.create_task(slow(engine))
    await until(inside.is_set)
    assert (await last_output(engine, "short", stream(2))).finished
    assert await engine.tokenize("short")
    assert not held.done()
    go_on.set()
    await held


async def test_owners_take_turns_in_slow_work(make: MakeEngine) -> None:
    """Of one owner one piece of work is done at a time, and in order. A grammar is slow work, also
    beside a short prompt of ids."""
    engine, go_on = make(), threading.Event()
    begun: list[str] = []
    check = engine.llm_engine.check_request

    def hold_first(request: GenerateRequest) -> CheckedRequest:
        begun.append(request.request_id or "")
        assert begun[-1][0] != "a" or go_on.wait(TIMEOUT_S)
        return check(request)

    engine.llm_engine.check_request = hold_first  # type: ignore[method-assign]

    def begin(request_id: str) -> asyncio.Task[Any]:
        params = stream(2, structured_outputs={"regex": "a"})
        owner = Owner(account=request_id[0])
        request = GenerateRequest(
            prompt_token_ids=[5], params=params, owner=owner, request_id=request_id
        )
        return asyncio.create_task(collect(engine.serve(request)))

    slow = [begin(f"a{number}") for number in range(3)]
    await until(lambda: begun == ["a0"])
    await asyncio.gather(*(begin(f"b{number}") for number in range(3)), begin("c0"))
    assert (begun[0], begun[-1]) == ("a0", "b2")
    slow[1].cancel()
    await asyncio.wait({slow[1]}, timeout=TIMEOUT_S)  # its work is cancelled by then
    go_on.set()
    await asyncio.gather(slow[0], slow[2])
    assert begun[5:] == ["a2"]


async def test_text_and_ids(engine: AsyncLLMEngine) -> None:
    token_ids = await engine.tokenize("hello there")
    assert token_ids == engine.llm_engine.tokenizer.encode("hello there")
    assert await engine.detokenize(token_ids) == "hello there"
    for wrong in (-1, 512, True, 1.5):
        with pytest.raises(errors.InvalidPromptError, match="no id of the vocabulary"):
            await engine.detokenize([5, wrong])  # type: ignore[list-item]
    with pytest.raises(errors.InvalidPromptError):
        await engine.tokenize("\ud800")
    request = GenerateRequest(prompt="a", messages=[{"role": "user", "content": "b"}])
    with pytest.raises(errors.InvalidPromptError, match="give one of them"):
        await anext(engine.serve(request))
