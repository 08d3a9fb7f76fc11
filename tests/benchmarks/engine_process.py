"""One engine in a process of its own, with the Python of its environment: `engine_process.py
SETTINGS`, started by `engines.py`.

SETTINGS is JSON: the engine, the path of its model, and options. After the load the process writes
a line of JSON about itself; then it reads workloads, one a line in JSON, and answers each with a
line. This file imports nothing of the project but the engine that it runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol

NUM_THREADS = 2
MAX_NUM_SEQS = 64
KV_CACHE_GIB = 2
LLAMA_BATCH = 2048
Workload = list[tuple[list[int], int]]
"""(prompt ids, number of output tokens) of each request."""


class Engine(Protocol):
    """What a process runs."""

    version: str

    def prepare(self, workload: Workload) -> None:
        """Does what has to be done before a workload; is not timed."""

    def serve(self, workload: Workload) -> Iterator[dict[int, int]]:
        """Serves all requests at once, greedily; yields after each step how many tokens each
        request got."""


class Stepping(Engine):
    """tpengine, or vLLM: `LLMEngine` of both has the same methods."""

    def __init__(self, settings: dict[str, Any]) -> None:
        options = {"max_num_seqs": MAX_NUM_SEQS, "disable_log_stats": True, **settings["options"]}
        if settings["engine"] == "tpengine":
            options = {"device": "cpu", "cpu_kv_cache_space": KV_CACHE_GIB} | options
        else:
            options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
            os.environ |= {
                "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
        package = import_module(settings["engine"])
        self.version = package.__version__
        self._sampling = import_module(f"{settings['engine']}.sampling_params")
        args = package.EngineArgs(model=settings["model"], **options)
        self._engine = package.LLMEngine.from_engine_args(args)
        self._num_requests = 0

    def serve(self, workload: Workload) -> Iterator[dict[int, int]]:
        """See `Engine`."""
        first = self._num_requests
        for prompt, num_output in workload:
            params = self._sampling.SamplingParams(
                temperature=0.0,
                max_tokens=num_output,
                ignore_eos=True,
                detokenize=False,
                output_kind=self._sampling.RequestOutputKind.DELTA,
            )
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
            self._num_requests += 1
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            yield {int(o.request_id) - first: len(o.outputs[0].token_ids) for o in outputs}


class OpenVINO(Engine):
    """OpenVINO GenAI's continuous batching. `model` is a GGUF file or an OpenVINO folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.version = openvino_genai.__version__
        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.max_num_seqs = MAX_NUM_SEQS
        for name, value in settings["options"].items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": NUM_THREADS}
        )

    def serve(self, workload: Workload) -> Iterator[dict[int, int]]:
        """See `Engine`."""
        handles = []
        for number, (prompt, num_output) in enumerate(workload):
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = num_output, True
            config.do_sample = False
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(number, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            new = {}
            for number, handle in enumerate(handles):
                if handle.can_read():
                    new[number] = sum(len(out.generated_ids) for out in handle.read().values())
            yield new


class LlamaCpp(Engine):
    """llama.cpp, or its fork ik_llama.cpp: a sequence of one context for each request. Of the C
    interface only what both have is used; they differ in samplers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._name = settings["engine"]
        package, interface = _LLAMA_LIBRARIES[self._name]
        self.version = f"{package} {version(package)}"
        self._lib = lib = import_module(interface)
        self._as_array = import_module("numpy").ctypeslib.as_array
        self._model = lib.llama_model_load_from_file(
            settings["model"].encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"{self._name} cannot load {settings['model']}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(LLAMA_BATCH, 0, 1)
        self._context: Any = None

    def prepare(self, workload: Workload) -> None:
        """Makes a context that holds the requests."""
        if self._context is not None:
            self._lib.llama_free(self._context)
        longest = max(len(prompt) + num_output for prompt, num_output in workload)
        params = self._lib.llama_context_default_params()
        params.n_ctx = -(-longest // 256) * 256 * len(workload)
        params.n_seq_max = len(workload)
        params.n_batch = LLAMA_BATCH
        params.n_threads = params.n_threads_batch = NUM_THREADS
        if self._name == "ik_llama.cpp" and len(workload) > 1:
            params.flash_attn = False  # with several sequences it ends at its assertion "S > 0"
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"{self._name} cannot make a context of {params.n_ctx} tokens")

    def serve(self, workload: Workload) -> Iterator[dict[int, int]]:
        """See `Engine`. All prompts are computed before the first decode."""
        rows = [
            (token, position, number, position == len(prompt) - 1)
            for number, (prompt, _) in enumerate(workload)
            for position, token in enumerate(prompt)
        ]
        made = [0] * len(workload)
        while rows:
            following = []
            for first in range(0, len(rows), LLAMA_BATCH):
                batch = rows[first : first + LLAMA_BATCH]
                self._compute(batch)
                sampled = {
                    number: self._likeliest(i)
                    for i, (_, _, number, is_sampled) in enumerate(batch)
                    if is_sampled
                }
                for number, token in sampled.items():
                    made[number] += 1
                    prompt, num_output = workload[number]
                    if made[number] < num_output:
                        position = len(prompt) + made[number] - 1
                        following.append((token, position, number, True))
                yield dict.fromkeys(sampled, 1)
            rows = following

    def _compute(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes rows of (token, position, sequence, whether logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, number, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit(f"{self._name} failed in a batch of {len(rows)} tokens")

    def _likeliest(self, row: int) -> int:
        """The token with the highest logit in a row of the last batch."""
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(self._as_array(logits, (self._vocab_size,)).argmax())


_LLAMA_LIBRARIES = {
    "llama.cpp": ("llama-cpp-python", "llama_cpp"),
    "ik_llama.cpp": ("ik-llama-cpp-python", "ik_llama_cpp._ctypes_api"),
}
"""By engine: the package, and its module with the C interface."""
ENGINES = {
    "tpengine": Stepping,
    "vllm": Stepping,
    "openvino": OpenVINO,
    "llama.cpp": LlamaCpp,
    "ik_llama.cpp": LlamaCpp,
}


def measure(engine: Engine, workload: Workload) -> dict[str, float]:
    """Seconds until every request has its first token, and to the end, with the number of tokens
    that all have then."""
    engine.prepare(workload)
    lengths = [0] * len(workload)
    first_s, first = 0.0, 0
    start = time.perf_counter()
    for new in engine.serve(workload):
        for number, count in new.items():
            lengths[number] += count
        if not first and all(lengths):
            first_s, first = time.perf_counter() - start, sum(lengths)
    total_s = time.perf_counter() - start
    wanted = [num_output for _, num_output in workload]
    if lengths != wanted:
        raise SystemExit(f"requests for {wanted} tokens got {lengths}: times cannot be compared")
    return {"first_s": first_s, "first_tokens": first, "total_s": total_s, "tokens": sum(lengths)}


def main() -> None:
    """Serves workloads until there are no more."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to the log
    os.environ |= {"OMP_NUM_THREADS": str(NUM_THREADS)}
    start = time.perf_counter()
    engine = ENGINES[settings["engine"]](settings)
    facts = {"version": engine.version, "start_s": time.perf_counter() - start}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
