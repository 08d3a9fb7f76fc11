"""An engine with ranks in the kernel of a Jupyter notebook."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engines import greedy, ids, outputs_of
from support.programs import PYTHONPATH
from support.waiting import PATIENCE_S, wait_until

from executor.ray_engines import free_cpus
from tpengine.executor.launch.node_agent import NodeAgent

PROMPT = [5, 6, 7]
NUM_TOKENS = 16
START = """
import asyncio
asyncio.get_running_loop()
from tpengine import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, ray_address={address!r}, device="cpu",
          dtype="float32", num_device_blocks_override=1024, max_num_seqs=64)
"""
GENERATE = """
params = SamplingParams(temperature=0.0, max_tokens={num_tokens}, ignore_eos=True)
for output in llm.generate(None, params, [{prompt}]):
    print("ids", output.outputs[0].token_ids)
"""
TAKE_LONG = """
print("begin", flush=True)
params = SamplingParams(temperature=1.0, max_tokens=500, ignore_eos=True)
while True:
    llm.generate(None, params, [[7, i] for i in range(64)], use_tqdm=False)
"""
PLACES = """
for place in llm.llm_engine._executor.places:
    print("rank", place.pid, place.start_ticks)
"""


class Notebook:
    """A kernel in a process of its own, and what its cells print."""

    def __init__(self) -> None:
        if find_spec("ipykernel") is None or find_spec("jupyter_client") is None:
            pytest.skip("ipykernel and jupyter_client are not installed: pip install -e '.[test]'")
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(
            startup_timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": PYTHONPATH}
        )

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[str, str | None]:
        """Runs a cell; returns what it printed, without the log, and its exception's name.

        Args:
            interrupt_at: presses the notebook's stop button once this was printed.
        """
        printed, error = "", None

        def take(message: dict[str, Any]) -> None:
            nonlocal printed, error, interrupt_at
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif message["msg_type"] == "error":
                error = content["ename"]
                printed += "\n".join(content["traceback"])
            if interrupt_at is not None and interrupt_at in printed:
                interrupt_at = None
                time.sleep(0.3)  # into a step
                self._manager.interrupt_kernel()

        self._client.execute_interactive(
            code, timeout=PATIENCE_S, output_hook=take, allow_stdin=False
        )
        return printed, error

    def lines(self, code: str) -> list[str]:
        """Those that a cell prints, which must not fail."""
        printed, error = self.run(code)
        assert error is None, printed
        return printed.splitlines()

    def close(self) -> None:
        """Ends the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with closing(Notebook()) as notebook:
        yield notebook


@pytest.mark.check
def test_cells(ray_address: str, folder: Path, notebook: Notebook) -> None:
    """In a running event loop; all cells run again; stopped in a step; at work afterwards."""
    expected = f"ids {ids(outputs_of(folder, [PROMPT], greedy(NUM_TOKENS)))[0]}"
    start = START.format(folder=str(folder), address=ray_address)
    generate = GENERATE.format(num_tokens=NUM_TOKENS, prompt=PROMPT)
    ranks = []
    for _ in range(2):
        notebook.lines(start)
        places = [line.split() for line in notebook.lines(PLACES) if line.startswith("rank ")]
        ranks.append([(int(pid), int(ticks)) for _, pid, ticks in places])
        assert expected in notebook.lines(generate)
    assert len(ranks[0]) == len(ranks[1]) == 2
    # The first engine was deleted: its ranks are gone, and their bundles are free.
    wait_until(lambda: not any(map(NodeAgent.state, ranks[0])))
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2)
    printed, error = notebook.run(TAKE_LONG, interrupt_at="begin")
    assert error == "KeyboardInterrupt", printed
    assert all(map(NodeAgent.state, ranks[1]))
    assert expected in notebook.lines(generate)
    notebook.close()
    wait_until(lambda: not any(map(NodeAgent.state, ranks[1])))
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"])
