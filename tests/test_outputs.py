"""Outputs as plain data."""

from __future__ import annotations

import dataclasses
import pickle

from tpengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_outputs_are_plain_data() -> None:
    metrics = RequestMetrics.of_arrival(7.0)
    assert metrics == RequestMetrics(7.0, 7.0, None, None, None)
    one = CompletionOutput(0, "x", (9,), -1.0, [{9: Logprob(-1.0, 1, "x")}])
    output = RequestOutput("r", "p", [1], [None], [one], False, metrics)
    assert pickle.loads(pickle.dumps(output)) == output
    as_dict = dataclasses.asdict(output)
    assert as_dict["outputs"][0]["logprobs"] == [
        {9: {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}
    ]
    assert as_dict["outputs"][0]["token_ids"] == (9,)
    assert as_dict["metrics"]["last_token_time"] == 7.0
    assert not one.finished()
    one.finish_reason = "stop"
    assert one.finished()
