"""Short ways to run an engine on ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.ranks import ThreadedExecutor
from tpengine import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from tpengine.config import EngineConfig
from tpengine.executor.local_executor import LocalExecutor

MAX_STEPS = 20_000
CACHE_TOKENS = 64 * 640
"""Room for 64 sequences of the random models' longest length."""


def open_llm(folder: Path | str, **args: Any) -> LLM:
    """An `LLM` in float32 whose cache holds `CACHE_TOKENS`, unless told otherwise."""
    args.setdefault("dtype", "float32")
    args.setdefault("block_size", 16)
    args.setdefault("num_device_blocks_override", CACHE_TOKENS // args["block_size"])
    return LLM(str(folder), **args)


def greedy(num_tokens: int = 64, **fields: Any) -> SamplingParams:
    """Greedy for a fixed number of tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **fields)


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """All prompts at once; every one must be served."""
    outputs = llm.generate(None, params, [list(prompt) for prompt in prompts], use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert llm.llm_engine.num_free_blocks == llm.llm_engine.num_total_blocks
    return outputs


def outputs_of(
    folder: Path | str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **args: Any,
) -> list[RequestOutput]:
    """Those of an engine that is opened for these prompts: see `open_llm` and `generate`."""
    with open_llm(folder, **args) as llm:
        return generate(llm, prompts, params)


def ids(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """Output ids of each request."""
    return [output.outputs[0].token_ids for output in outputs]


def bits(output: RequestOutput) -> list[Any]:
    """Of each sequence the numbers that are to be equal as bits."""
    return [(o.token_ids, o.cumulative_logprob, o.logprobs) for o in output.outputs]


def preemptions(outputs: Sequence[RequestOutput]) -> int:
    """How often requests were preempted, all together."""
    return sum(output.metrics.num_preemptions for output in outputs if output.metrics)


def make_engine(folder: Path | str, **args: Any) -> LLMEngine:
    """An engine in float32 with 256 blocks, unless told otherwise."""
    args = {"dtype": "float32", "num_device_blocks_override": 256, **args}
    return LLMEngine.from_engine_args(EngineArgs(str(folder), disable_log_stats=True, **args))


@contextmanager
def open_engine(folder: Path | str, tp_size: int = 1, **args: Any) -> Iterator[LLMEngine]:
    """An engine in float32 on CPU. Several ranks are threads of this process."""
    args = {"dtype": "float32", "device": "cpu", **args}
    num_stages = args.get("pipeline_parallel_size", 1)
    if num_stages > 1:
        args["executor"] = "processes"  # as far as the configuration knows
    config = EngineArgs(str(folder), **args).create_engine_config("cpu")
    is_alone = tp_size == num_stages == 1
    executor = LocalExecutor(config) if is_alone else ThreadedExecutor(config, tp_size)
    with LLMEngine(config, executor, log_stats=False) as engine:
        yield engine


def with_steps_in_flight(config: EngineConfig, count: int) -> EngineConfig:
    """The same, with so many steps in flight, however short they are."""
    limits = replace(config.scheduler, max_steps_in_flight=count, ahead_from_s=0.0)
    return replace(config, scheduler=limits)


def serve(
    engine: LLMEngine,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    adapters: Sequence[LoRARequest | None] | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> list[RequestOutput]:
    """The last output of each request, when all have ended; they are served side by side.

    Args:
        prompts: ids, or any other form that a request takes.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    each_adapter = adapters or [None] * len(prompts)
    for i, (prompt, own, adapter) in enumerate(zip(prompts, each, each_adapter, strict=True)):
        form = prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)}
        engine.add_request(str(i), form, own, lora_request=adapter)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        after_step()
    assert engine.num_free_blocks == engine.num_total_blocks
    return [last[str(i)] for i in range(len(prompts))]


def run(engine: LLMEngine) -> list[RequestOutput]:
    """Steps until nothing is left; all outputs in order."""
    outputs = []
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError(f"requests are unfinished after {MAX_STEPS} steps")


def complete(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> Any:
    """The only sequence of one request, finished."""
    engine.add_request("one", None, params, prompt_token_ids=prompt)
    final = run(engine)[-1]
    assert final.finished
    assert final.error is None
    return final.outputs[0]
