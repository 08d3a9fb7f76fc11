"""Rank 0 compiles a grammar on a thread. Its request waits for it; other requests go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.byte_llama import write
from support.engines import greedy, open_engine
from support.patches import on_call
from support.waiting import PATIENCE_S, wait_until

from tpengine import RequestOutput, SamplingParams
from tpengine.structured.grammars import Vocabulary


class Compiler:
    """Holds each grammar that has `held` in it.

    Attributes:
        compiled: all grammars that were compiled in this process, in order.
        go_on: set it to let the thread go on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.go_on = threading.Event()

        def hold(_: Vocabulary, grammar: str) -> None:
            assert "held" not in grammar or self.go_on.wait(PATIENCE_S)
            self.compiled.append(grammar)

        on_call(monkeypatch, Vocabulary, "_compile", hold)


def held(regex: str, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=30, structured_outputs={"regex": regex}, **fields)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_streams_go_on_while_a_grammar_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    compiler, last = Compiler(monkeypatch), dict[str, RequestOutput]()
    with open_engine(write(tmp_path), tp_size, max_num_seqs=8) as engine:

        def step_until(*request_ids: str) -> None:
            while not all(key in last and last[key].finished for key in request_ids):
                last.update({output.request_id: output for output in engine.step()})

        def add(request_id: str, params: SamplingParams) -> None:
            engine.add_request(request_id, None, params, prompt_token_ids=[5, 6, 7])

        add("known", held("yes|no"))
        step_until("known")
        for request_id, regex in (("slow", "held"), ("left", "held_too"), ("next", "next")):
            add(request_id, held(regex))
        add("plain", greedy(20))
        add("again", held("yes|no", seed=1))
        step_until("plain", "again")
        assert last.keys() == {"known", "plain", "again"}
        engine.abort_request("left")
        step_until("left")
        assert engine.get_num_unfinished_requests() == 2
        compiler.go_on.set()
        step_until("slow", "next")
        texts = {key: output.outputs[0].text for key, output in last.items()}
    assert (texts["slow"], texts["next"]) == ("held", "next")
    assert texts["again"] in ("yes", "no")
    assert len(compiler.compiled) == 4


def test_grammars_of_unfinished_requests_stay_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more requests than are kept otherwise; and swapped ones come back without compiling."""
    compiler = Compiler(monkeypatch)
    args = {"max_num_seqs": 4, "block_size": 8, "num_device_blocks_override": 7}
    with open_engine(write(tmp_path), preemption_mode="swap", max_model_len=48, **args) as engine:
        for number in range(70):
            params = held(f"[ac]{{12}}{number}", seed=1)
            engine.add_request(str(number), None, params, prompt_token_ids=[5])
        texts = {}
        engine.step()  # begins to compile all of them; one at a time they would need no swap
        wait_until(lambda: len(compiler.compiled) == 70)
        while engine.has_unfinished_requests():
            texts |= {out.request_id: out.outputs[0].text for out in engine.step() if out.finished}
        assert engine.stats().num_preemptions
    assert [texts[str(number)][12:] for number in range(70)] == [str(i) for i in range(70)]
    assert len(compiler.compiled) == 70
