"""GPU memory that outlives its process, over a stand-in for the driver, and on a card."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from ops.cases import GPU
from ops.cuda_host_library import SOURCES, compile_host, load_host, needs_compiler
from support.engines import greedy
from support.leftovers import nothing_left
from support.models import ModelShop
from support.waiting import PATIENCE_S
from support.zoo import PLAIN

from tpengine import EngineArgs, LLMEngine
from tpengine.config import EngineConfig
from tpengine.errors import TemporaryError
from tpengine.executor import held_files
from tpengine.executor.held_files import AgentFiles
from tpengine.executor.home import keeps_memory
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.messages import BlockMoves
from tpengine.worker.cache_engine import CacheEngine, CacheShape
from tpengine.worker.gpu_memory import GpuSections
from tpengine.worker.rank_memory import RankMemory

SIZES = CacheShape(torch.device("meta"), torch.float32, 8, 2, 2, 16), 6, 4


@pytest.fixture(scope="module")
def config(models: ModelShop) -> EngineConfig:
    return EngineArgs(str(models.folder(PLAIN)), device="cpu").create_engine_config("cpu")


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    """In the end nothing is open that was not open before."""
    library = load_host("driver")
    with nothing_left(), closing(NodeAgent()) as agent:
        yield agent
    gc.collect()
    assert library.num_left() == 0


class Place:
    """Opens the memory of rank 0 of an agent, as a rank does."""

    def __init__(self, agent: NodeAgent, config: EngineConfig) -> None:
        kept = agent.keep_memory(0, is_new=True, on_gpu=True)
        assert kept is not None
        (self.path, self.target), self._config = kept, config

    def open(self, engine_id: str = "e") -> RankMemory:
        source = SOURCES / "driver.cpp"
        library = compile_host(source, "-O1", "-shared", "-fPIC")
        gpu = GpuSections(AgentFiles(self.target), str(library), "cpu")
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return RankMemory(file, self._config, 0, engine_id, 1, gpu)
        except TemporaryError:
            os.close(file)
            raise


def close(memory: RankMemory) -> None:
    os.close(memory._fd)


def die(work: Callable[[], object]) -> None:
    """Runs it in a process that then kills itself."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@needs_compiler
def test_a_killed_process_leaves_its_memory(agent: NodeAgent, config: EngineConfig) -> None:
    """Weights, blocks, swapped blocks and the number of moves that are done."""
    place = Place(agent, config)

    def leave() -> None:
        memory, whole = place.open(), torch.arange(60.0).view(6, 10)
        assert memory.save([whole[1:3], whole, torch.empty(0, 7)], {})
        pool = memory.keep_blocks(4000, 1)((10, 100), torch.float32)
        host = memory.keep_host_blocks((3, 5), torch.float32)
        assert host is not None
        pool.fill_(3.0)
        host.fill_(4.0)
        memory.moves_done = 9

    die(leave)
    memory = place.open()
    view, whole, empty = memory.load({})
    assert view.tolist() == torch.arange(60.0).view(6, 10)[1:3].tolist()
    assert empty.shape == (0, 7)
    view[0, 0] = -1.0
    assert whole[1, 0] == -1.0
    pool = memory.keep_blocks(4000, 1)((10, 100), torch.float32)
    host = memory.keep_host_blocks((3, 5), torch.float32)
    assert host is not None
    assert set(pool.flatten().tolist()) == {3.0}
    assert set(host.flatten().tolist()) == {4.0}
    assert memory.moves_done == 9
    assert memory.gpu_bytes == memory._sections["weights"][1] + 4000 + (2 << 20)
    with pytest.raises(TemporaryError, match="number of bytes of blocks"):
        memory.keep_blocks(5000, 1)
    memory.drop_blocks()
    assert agent._of_gpus[0]._files.keys() == {"weights"}
    memory.keep_blocks(5000, 1)((50, 25), torch.float32).fill_(1.0)
    close(memory)


@needs_compiler
def test_memory_that_is_not_there(agent: NodeAgent, config: EngineConfig, caplog: Any) -> None:
    """Of another engine, shorter than the index says, dropped, or no room for it."""
    place = Place(agent, config)
    memory = place.open()
    memory.section("blocks", 100)
    with pytest.raises(TemporaryError, match="its engine is 'e', and not 'f'"):
        place.open("f")
    memory._sections["blocks"] = 0, 5 << 20
    memory._mapped.clear()
    with pytest.raises(TemporaryError, match="cuMemMap gave error 1"):
        memory.section("blocks", 5 << 20)
    AgentFiles(place.target).drop("blocks")
    with pytest.raises(TemporaryError, match="blocks are not held"):
        memory.section("blocks", 5 << 20)
    memory.drop("blocks")
    with pytest.raises(MemoryError, match="cuMemCreate"):
        memory.section("blocks", 1 << 40)
    agent.free_memory()
    tensor = torch.ones(3)
    where = tensor.data_ptr()
    assert not memory.save([tensor], {})
    assert tensor.data_ptr() == where
    assert "not replaced with its GPU memory" in caplog.text
    caplog.clear()  # the error in it has the memory in its traceback
    close(memory)


@needs_compiler
def test_another_user_gets_nothing(
    agent: NodeAgent, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(agent, config)
    files = AgentFiles(place.target)
    with open("/dev/null", "rb") as file:
        files.put("a", file.fileno())

    def answer_to(order: bytes) -> bytes:
        """Without the check that a rank makes itself."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.settimeout(PATIENCE_S)
            other.connect(f"\0{place.target}")
            with suppress(BrokenPipeError):
                other.send(order)
            return other.recv(10)

    assert answer_to(b"take a") == answer_to(b"what is this") == b"."
    with monkeypatch.context() as patch:
        patch.setattr(held_files.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError):
            files.take("a")
        with suppress(ConnectionResetError):
            assert answer_to(b"take a") == b""


@needs_compiler
def test_blocks_of_a_gpu_are_found_again(agent: NodeAgent, config: EngineConfig) -> None:
    """Those of the pool and swapped ones, with the cache as a GPU has it."""
    place = Place(agent, config)

    def engine(memory: RankMemory) -> CacheEngine:
        return CacheEngine(*SIZES, memory)

    def leave() -> None:
        first = engine(place.open())
        for number, (k_cache, v_cache) in enumerate(first.kv_caches):
            k_cache.fill_(number)
            v_cache.fill_(number + 10)
        first.move(BlockMoves(swap_outs=[(1, 3)]), 7)
        first.kv_caches[0][0][1].fill_(-1.0)

    die(leave)
    memory = place.open()
    second = engine(memory)
    second.move(BlockMoves(swap_outs=[(1, 3)]), 7)
    second.move(BlockMoves(swap_ins=[(3, 4)]), 8)
    for number, (k_cache, v_cache) in enumerate(second.kv_caches):
        assert (k_cache[4] == number).all()
        assert (v_cache[4] == number + 10).all()
    del second, k_cache, v_cache
    memory.drop_blocks()
    close(memory)


def test_gpus_keep_memory_only_on_request(models: ModelShop) -> None:
    def keeps(keep_kv: str, size: int, device: str) -> bool:
        args: dict[str, Any] = {"tensor_parallel_size": size, "executor": "processes"}
        args |= {"keep_kv": keep_kv, "device": device}
        return keeps_memory(
            EngineArgs(str(models.folder(PLAIN)), **args).create_engine_config(device)
        )

    assert keeps("safe", 2, "cpu")
    assert [keeps(how, 1, "cuda") for how in ("safe", "always", "never")] == [False, True, False]
    assert not keeps("always", 2, "cuda")


class TestOnCard:
    """A rank with kept memory is killed; every output is as without the loss."""

    pytestmark = GPU

    @pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
    def test_a_killed_rank(self, models: ModelShop, enforce_eager: bool) -> None:
        folder = models.folder(PLAIN)
        prompts = models.oracle(folder).prompts((60, 7, 19, 33), seed=3)
        args: dict[str, Any] = {"executor": "processes", "keep_kv": "always", "swap_space": 0.05}
        args |= {"device": "cuda", "dtype": "float32", "enforce_eager": enforce_eager}
        args |= {"max_model_len": 128, "max_num_seqs": 8, "num_device_blocks_override": 18}
        with LLMEngine.from_engine_args(EngineArgs(str(folder), **args)) as engine:
            executor: Any = engine._executor

            def serve(last_step: int | None) -> list[Any]:
                done: dict[str, Any] = {}
                for number, prompt in enumerate(prompts):
                    engine.add_request(str(number), None, greedy(40), prompt_token_ids=prompt)
                first_step = engine.counters.num_steps
                while engine.has_unfinished_requests():
                    if (
                        last_step is not None
                        and engine.counters.num_steps >= first_step + last_step
                    ):
                        last_step = None
                        os.kill(executor.places[0].pid, signal.SIGKILL)
                    done |= {output.request_id: output for output in engine.step()}
                return [done[str(number)].outputs[0].token_ids for number in range(len(prompts))]

            expected = serve(None)
            assert serve(9) == expected
            assert [record.is_resumed for record in engine.recoveries] == [True]
