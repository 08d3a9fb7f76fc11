"""A request that fails, for any reason, fails alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.patches import fail_at
from support.small_llamas import MakeEngine, run

from tpengine.engine import output_processor
from tpengine.engine.beam_search import BeamSearch
from tpengine.errors import InvalidSamplingParamsError
from tpengine.sampling_params import SamplingParams

PROMPT = [3 + (7 * place) % 250 for place in range(20)]
FREE = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
BEAMS = SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (replace(FREE, n=33, best_of=None), "33 sequences, but max_num_seqs = 32"),
        (replace(FREE, n=1, best_of=33), "33 sequences, but max_num_seqs = 32"),
        (replace(BEAMS, n=30, best_of=None), "30 beams .* together.*max_num_batched_tokens = 24"),
        (
            replace(BEAMS, n=20, best_of=None, stop_token_ids=[*range(240)]),
            "260 candidates.*has 256",
        ),
    ],
)
def test_refused_by_the_engine_which_goes_on(
    make_engine: MakeEngine, params: SamplingParams, words: str
) -> None:
    engine = make_engine(max_num_batched_tokens=24)
    with pytest.raises(InvalidSamplingParamsError, match=words):
        engine.add_request("bad", None, params, prompt_token_ids=PROMPT)
    assert run(engine, [("good", PROMPT, FREE)])["good"].error is None


@pytest.mark.parametrize(
    "params",
    [
        BEAMS,
        replace(FREE, n=3, best_of=None, logprobs=0),
        replace(FREE, n=1, best_of=3, logprobs=0),
    ],
)
def test_what_raises_while_output_is_processed_ends_its_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    engine = make_engine()
    others = [
        (str(i), PROMPT[i:], replace(FREE, n=1 + i % 2, best_of=None, seed=i)) for i in range(4)
    ]
    wanted = run(engine, others)
    # Of these requests only the bad one searches beams or asks for log probabilities. It fails at
    # its fifth token, of the second of its three sequences.
    error = ZeroDivisionError("no such luck")
    fail_at(monkeypatch, BeamSearch, "advance", 5, error)
    fail_at(monkeypatch, output_processor, "as_logprobs", 4 * 3 + 2, error)
    answers = run(engine, [*others[:2], ("bad", PROMPT, params), *others[2:]])
    bad = answers.pop("bad")
    assert bad.finished
    assert {o.finish_reason for o in bad.outputs} == {"error"}
    assert bad.error == "request '2' failed: ZeroDivisionError: no such luck"  # it is the third
    for key, output in wanted.items():
        assert [o.token_ids for o in answers[key].outputs] == [o.token_ids for o in output.outputs]
        assert answers[key].error is None
    run(engine, [(str(i), PROMPT[:1], replace(FREE, max_tokens=1)) for i in range(32)])
    assert engine.last_step.num_rows == 32, "a slot of the request that failed is not free"
    assert run(engine, others[:1])["0"].outputs[0].token_ids == wanted["0"].outputs[0].token_ids
