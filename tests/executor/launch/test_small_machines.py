"""A model that does not fit into the memory of either of two machines runs as two pipeline stages.

The machines are namespaces, each with a control group that limits its memory; Ray's head and the
driver are at the desk, which has no limit. The commands are those of `docs/ray.md`.
"""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machines import Machines
from support.tiny_llama import TinyLlama, write_word_tokenizer
from support.waiting import wait_until

from tpengine import LLM, SamplingParams

ROOT = Path(__file__).parents[3]
DRIVER = ROOT / "examples" / "ray_driver.py"
HEAD = "10.77.0.254"
RAY = "ray start {} --object-store-memory=80000000 --disable-usage-stats > ~/ray.log 2>&1"
MACHINE_BYTES = 2500 << 20
"""Ray and the libraries of a rank take about 0.8 GiB of it."""
MODEL = TinyLlama(
    num_heads=32, num_kv_heads=8, hidden_size=2048, intermediate_size=8192, num_layers=12
)
"""730 million parameters: 2.7 GiB in float32."""
MAX_TOKENS = 8
SIZES = {"max_model_len": 256, "max_num_batched_tokens": 256, "cpu_kv_cache_space": 0.05}
OPTIONS = (
    f"--device cpu --dtype float32 --max-tokens {MAX_TOKENS} --token-ids "
    "--max-model-len 256 --max-num-batched-tokens 256 --cpu-kv-cache-space 0.05"
)
LIMIT_S = 200.0


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new control group, of version 1 or 2, with a limit of memory."""
    own = Path("/proc/self/cgroup").read_text()
    version_1 = re.search(r"^\d+:memory:/(.*)$", own, re.MULTILINE)
    parent, file = Path("/sys/fs/cgroup"), "memory.max"
    if version_1 is not None:
        parent, file = parent / "memory" / version_1[1], "memory.limit_in_bytes"
    group = parent / f"tpengine-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / file).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="processes are left")
        group.rmdir()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two small ones, with a Ray over them."""
    pytest.importorskip("ray")
    env = {"TPENGINE_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(memory_group(MACHINE_BYTES)) for _ in range(2)]
        cluster = stack.enter_context(Machines(2, env, [tmp_path]))
        head = f"--head --node-ip-address={HEAD} --port=6379 --include-dashboard=false --num-cpus=0"
        commands = [(None, RAY.format(head))]
        for number, group in enumerate(groups):
            address = f"--address={HEAD}:6379 --node-ip-address={cluster.addresses[number]}"
            start = RAY.format(f"{address} --num-cpus=1")
            commands.append((number, f"echo 0 > {group}/cgroup.procs && {start}"))
        for machine, command in commands:
            done = cluster.run(machine, command, LIMIT_S)
            assert done.returncode == 0, cluster.run(machine, "tail -50 ~/ray.log").stdout
        yield cluster


def generate_here(folder: Path) -> list[list[int]]:
    """What one process without a limit generates for the prompts of the driver."""
    prompts = runpy.run_path(str(DRIVER))["PROMPTS"]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(str(folder), dtype="float32", device="cpu", **SIZES) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.soak  # a minute
def test_two_stages_where_one_machine_is_too_small(machines: Machines, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    MODEL.write(folder)
    write_word_tokenizer(folder, MODEL.vocab_size)
    command = f"python {DRIVER} --model {folder} {OPTIONS}"
    alone = machines.run(None, command, LIMIT_S)
    print(alone.stdout)
    assert alone.returncode != 0
    lost = r"WorkerDiedError: rank 0 on node \S+ \(machine\d\), pid \d+ was lost in load_model"
    assert re.search(rf"{lost} .* for lack of memory", alone.stdout)

    both = machines.run(None, f"{command} --pipeline-parallel-size 2", LIMIT_S)
    print(both.stdout)
    assert both.returncode == 0
    for machine, layers in enumerate(("0-5", "6-11")):
        stage = f"stage {machine}: layers {layers} of 12"
        assert re.search(rf"{stage}, .*\(machine{machine}\)", both.stdout)
    answers = re.findall(r"^'.*' -> (\[\d+(?:, \d+)*\])", both.stdout, re.MULTILINE)
    assert list(map(json.loads, answers)) == generate_here(folder)
