"""The walk of `cluster/README.md`, from `ray up` to `ray down`, over three machines.

The commands are the README's own, the `ray up` file is ours with its CHANGE lines filled in, and
what one rank on each of two machines generates is what one process generates. So is what three
pipeline stages generate, one on each machine, also when the one in the middle is killed meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery.campaign_driver import NUM_STREAMS
from support.machines import Machines, wait_until
from support.system_packages import require

from executor.driver_process import DriverProcess
from tpengine import LLM, SamplingParams
from tpengine.config import EMBEDDED_MODEL

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
README = (ROOT / "cluster" / "README.md").read_text()
NUM_MACHINES = 3
MODEL = "~/models/my-model"
"""Where the file puts it."""
LIMITS_S = {"ray up": 200.0, "ray exec": 90.0, "ray submit": 200.0, "ray down": 90.0}
WORKERS_S = 120.0
LINE_S = 90.0
END_S = 60.0
LOOK_S = 0.5
"""Between two looks, each of which starts processes."""
MAX_TOKENS = 32
OPTIONS = (
    f"--model '{MODEL}' --ray-placement-strategy STRICT_SPREAD --device cpu --dtype float32 "
    f"--cpu-kv-cache-space 0.1 --max-tokens {MAX_TOKENS} --token-ids"
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """With what their user has at the desk: the file, the driver and the model."""
    pytest.importorskip("ray")
    require("rsync", "rsync")
    environment = {
        "TPENGINE_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with Machines(NUM_MACHINES, environment) as cluster:
        desk = cluster.folder_of(None, "home")
        (desk / "cluster").mkdir()
        file = desk / "cluster" / "on_premises.yaml"
        file.write_text(fill_in((ROOT / "cluster" / file.name).read_text(), cluster.addresses))
        (desk / "wheels").mkdir()
        (desk / "wheels" / "tpengine-0-py3-none-linux_x86_64.whl").touch()
        shutil.copytree(ROOT / "examples", desk / "examples", ignore=shutil.ignore_patterns("_*"))
        shutil.copytree(EMBEDDED_MODEL, desk / MODEL.removeprefix("~/"))
        yield cluster


def fill_in(text: str, addresses: list[str]) -> str:
    """Edits the lines marked CHANGE as a user would; all others stay."""
    head, *workers = addresses
    changes = {
        r"head_ip: \S+": f"head_ip: {head}",
        r"worker_ips: \[.*\]": f"worker_ips: [{', '.join(workers)}]",
        r"min_workers: \d+": f"min_workers: {len(workers)}",
        r"max_workers: \d+": f"max_workers: {len(workers)}",
        r"ssh_user: \S+": "ssh_user: root",
        r'# ("~/models/my-model": \S+)': r"\1",
        # The machines have tpengine: see what is visible to them in `Machines`.
        r"- python -m pip install .*": "- ls ~/wheels/*.whl && python -c 'import tpengine'",
    }
    for pattern, line in changes.items():
        text, count = re.subn(pattern, line, text)
        assert count == 1, f"{count} lines match {pattern}"
    return text


def typed(start: str) -> str:
    """The command of the README that starts so, without its comment."""
    lines = [line for line in README.splitlines() if re.match(rf"{start}\b", line)]
    assert len(lines) == 1, f"the README has {len(lines)} lines with {start}"
    return lines[0].partition("  #")[0].strip()


def at_desk(machines: Machines, command: str, limit_s: float = 30.0) -> str:
    """What a line of the user's prints."""
    start = time.monotonic()
    done = machines.run(None, command, limit_s)
    print(f"[{time.monotonic() - start:.1f} s] {command}")
    if done.returncode != 0:
        pytest.fail(f"{command}: exit {done.returncode}\n{done.stdout[-6000:]}\n{logs(machines)}")
    return done.stdout


def logs(machines: Machines) -> str:
    """The ends of what Ray's processes wrote on each machine."""
    parts = [machines.logs()]
    for machine in range(NUM_MACHINES):
        folder = machines.folder_of(machine, "tmp") / "ray"
        for name in ("monitor.*", "raylet.out", "raylet.err", "gcs_server.out", "worker*.err"):
            for path in sorted(folder.glob(f"session_2*/logs/{name}")):
                if text := path.read_text(errors="replace")[-3000:].rstrip():
                    parts.append(f"--- {path.name} of machine {machine}\n{text}")
    return "\n".join(parts)


def processes(machines: Machines, machine: int, name: str) -> list[str]:
    """Those of a machine whose name starts so, but for those that only wait for their parent."""
    lines = machines.run(machine, "cat /proc/[0-9]*/stat 2> /dev/null").stdout.splitlines()
    parts = [line.partition("(")[2].rpartition(") ") for line in lines]
    return [full for full, _, rest in parts if full.startswith(name) and rest[:1] not in "ZX"]


def wait_for_workers(machines: Machines) -> None:
    """They come after `ray up` has returned; then the README's command shows them."""
    for machine in range(NUM_MACHINES):
        wait_until(
            lambda m=machine: bool(processes(machines, m, "raylet")),
            WORKERS_S,
            f"machine {machine} does not join",
            lambda: logs(machines),
            LOOK_S,
        )
    wanted = NUM_MACHINES * (os.cpu_count() or 1)
    answers = [""]

    def there() -> bool:
        answers.append(at_desk(machines, typed("ray exec"), LIMITS_S["ray exec"]))
        total = re.search(r"/([\d.]+) CPU", answers[-1])
        return total is not None and float(total[1]) >= wanted

    wait_until(there, WORKERS_S, "workers missing", lambda: answers[-1] + logs(machines), LOOK_S)


def generated(output: str) -> list[list[int]]:
    """What `examples/ray_driver.py` printed for each prompt."""
    answers = re.findall(r"^'.*' -> \[(\d+(?:, \d+)*)\]", output, re.MULTILINE)
    return [[int(token) for token in ids.split(", ")] for ids in answers]


def generate_here() -> list[list[int]]:
    """What one process generates for the prompts of `examples/ray_driver.py`."""
    prompts = runpy.run_path(str(ROOT / "examples" / "ray_driver.py"))["PROMPTS"]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(EMBEDDED_MODEL, dtype="float32", device="cpu", cpu_kv_cache_space=0.1) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_places(machines: Machines, output: str) -> None:
    """One rank on each of two machines, in the order of addresses, joined over the network."""
    places = re.findall(r"rank (\d) on node (\S+) \(machine(\d)\)", output)
    assert [rank for rank, _, _ in places] == ["0", "1"], output
    assert len({address for _, address, _ in places}) == 2
    for rank, address, machine in places:
        assert address == machines.addresses[int(machine)]
        assert f"rank {rank} of 2 at {address} (interface eth0) by gloo" in output


def check_stages(machines: Machines) -> None:
    """Three stages on three machines: their tokens are those of one process, also when the rank in
    the middle is killed."""
    stages = {"pipeline_parallel_size": NUM_MACHINES, "ray_placement_strategy": "STRICT_SPREAD"}
    driver = f"{TESTS / 'recovery' / 'campaign_driver.py'} {MODEL} ray auto"
    program = f"PYTHONPATH=$PYTHONPATH:{TESTS} RAY_AUTH_MODE=token python {driver}"
    command = f"{program} {shlex.quote(json.dumps(stages))} 2> ~/stages.log"
    process = DriverProcess(machines.command(0, command, 4 * LINE_S), stdin=subprocess.PIPE)
    log = machines.folder_of(0, "home") / "stages.log"
    try:
        ranks = process.hear(LINE_S)
        assert [address for address, _ in ranks] == machines.addresses
        process.say("decode", 0.01)
        assert process.hear(LINE_S) == ranks
        killed = machines.run(1, f"kill -KILL {ranks[1][1]}")
        assert killed.returncode == 0, killed.stdout
        same, _, _, error, loss = process.hear(LINE_S)
        assert (same, error) == (NUM_STREAMS, "")
        assert f"rank 1 on node {machines.addresses[1]}" in loss
        process.say("end", 0.0)
        assert process.hear(LINE_S) == "closed"
        process.say()
        assert process.process.wait(LINE_S) == 0
    finally:
        process.end()
        print(log.read_text(errors="replace")[-6000:])
    for rank, address in enumerate(machines.addresses):
        place = f"rank {rank} of {NUM_MACHINES} at {address} (interface eth0)"
        line = f"{place} by stage {rank} of {NUM_MACHINES} (sockets)"
        assert log.read_text().count(line) == 2, "not over sockets, before or after the kill"


@pytest.mark.timeout(600)
def test_from_ray_up_to_ray_down(machines: Machines) -> None:
    at_desk(machines, typed("ray get-auth-token"))
    at_desk(machines, typed("ray up"), LIMITS_S["ray up"])
    wait_for_workers(machines)

    command = f"{typed('ray submit')} {OPTIONS}"
    assert "--tensor-parallel-size 2 " in command
    output = at_desk(machines, command, LIMITS_S["ray submit"])
    check_places(machines, output)
    answers = generated(output)
    assert len(answers) == 4, output
    assert answers == generate_here()
    check_stages(machines)
    for machine in range(NUM_MACHINES):
        wait_until(
            lambda m=machine: not processes(machines, m, "ray::RayWorker"),
            END_S,
            f"ranks are left on machine {machine}",
            poll_s=LOOK_S,
        )

    assert processes(machines, 0, "raylet")

    def is_gone() -> bool:
        return not processes(machines, 0, "raylet") + processes(machines, 0, "gcs_server")

    at_desk(machines, typed("ray down"), LIMITS_S["ray down"])
    try:
        wait_until(is_gone, END_S, "Ray is left on the head", poll_s=LOOK_S)
    except AssertionError:
        # Seen on a busy machine: Ray itself did not end all of its processes, and advises this.
        print(machines.run(0, "ps -eo pid,ppid,stat,etimes,args").stdout)
        machines.run(0, "ray stop --force")
        wait_until(is_gone, END_S, "Ray is left on the head", lambda: logs(machines), LOOK_S)
