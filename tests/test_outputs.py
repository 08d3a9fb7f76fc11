"""Outputs as plain data."""

from __future__ import annotations

import dataclasses
import pickle

from tpengine import LLM, SamplingParams
from tpengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_outputs_are_plain_data() -> None:
    metrics = RequestMetrics.of_arrival(7.0)
    assert metrics == RequestMetrics(7.0, 7.0, None, None, None)
    one = CompletionOutput(0, "x", (9,), -1.0, [{9: Logprob(-1.0, 1, "x")}])
    output = RequestOutput("r", "p", [1], [None], [one], False, metrics)
    as_dict = dataclasses.asdict(output)
    assert as_dict["outputs"][0]["logprobs"] == [
        {9: {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}
    ]
    assert as_dict["outputs"][0]["token_ids"] == (9,)
    assert as_dict["metrics"]["last_token_time"] == 7.0
    assert not one.finished()
    one.finish_reason = "stop"
    assert one.finished()


def test_an_output_of_an_engine_can_be_pickled() -> None:
    with LLM(max_model_len=64, num_gpu_blocks_override=16, disable_log_stats=True) as llm:
        params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
        (output,) = llm.generate("A", params, use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.finished_time is not None
    assert output.outputs[0].logprobs
    assert pickle.loads(pickle.dumps(output)) == output
