"""`n` and `best_of`: shared prompts, noise of their own, streaming and ranking."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.small_llamas import MakeEngine, run

from tpengine import RequestOutput, SamplingParams

from .loop import Limits, Loop, make_request, run_alone

PROMPT = [3 + (7 * place) % 250 for place in range(37)]
FREE = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True, logprobs=0)


def ids_of(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.mark.parametrize(("num_prompt_tokens", "num_shared"), [(96, 12), (90, 11)])
def test_prompt_held_once(make_engine: MakeEngine, num_prompt_tokens: int, num_shared: int) -> None:
    """Eight sequences share its full blocks, and after the first token each has one more. A partly
    filled block is copied by all but one."""
    engine = make_engine(max_num_batched_tokens=128, enable_prefix_caching=False)
    prompt = (PROMPT * 3)[:num_prompt_tokens]
    engine.add_request("eight", None, replace(FREE, n=8, best_of=None), prompt_token_ids=prompt)
    for num_held in (12, *[num_shared + 8] * 6):
        engine.step()
        assert engine.num_total_blocks - engine.num_free_blocks == num_held
    while engine.has_unfinished_requests():
        engine.step()


def test_best_of_returns_the_likeliest_when_all_are_complete(make_engine: MakeEngine) -> None:
    engine = make_engine()
    four = run(engine, [("four", PROMPT, FREE)])["four"]
    ranked = sorted(four.outputs, key=lambda o: -(o.cumulative_logprob or 0.0))
    params = replace(FREE, n=2, best_of=4, logprobs=None)
    engine.add_request("best", None, params, prompt_token_ids=PROMPT)
    reports = []
    while engine.has_unfinished_requests():
        reports += engine.step()
    (best,) = reports
    assert ids_of(best) == [list(o.token_ids) for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None
    for mine, theirs in zip(best.outputs, ranked, strict=False):
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)


def test_sequences_end_by_themselves(make_engine: MakeEngine) -> None:
    """One that stops early gives its place back while the others go on."""
    engine = make_engine()
    four = run(engine, [("four", PROMPT, FREE)])["four"]
    stop = four.outputs[2].token_ids[3]
    params = replace(FREE, stop_token_ids=(stop,))
    engine.add_request("stopped", None, params, prompt_token_ids=PROMPT)
    last, fewest = None, 4
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
            if not output.finished:
                fewest = min(fewest, sum(not o.finished() for o in output.outputs))
    assert fewest < 4
    for mine, whole in zip(last.outputs, four.outputs, strict=True):
        cut = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else None
        assert mine.token_ids == whole.token_ids[:cut]
        assert mine.finish_reason == ("length" if cut is None else "stop")
    assert last.outputs[2].stop_reason == stop


def test_beams_advance_together_or_not_at_all() -> None:
    """Where the budget of a step has room for some of them only, they wait."""
    loop = Loop(Limits(tokens=4))
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    beams = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8, ignore_eos=True)
    for index in range(2):
        loop.add(make_request(index, [index + 1], plain))
    group = loop.add(make_request(2, [5, 6], beams))
    rows = []
    while loop.scheduler.has_unfinished_requests():
        output = loop.step()
        rows.append(sum(sequence in group.sequences for sequence in output.rows))
    assert set(rows) == {0, 1, 3}  # the prompt is one row
    shared, alone = loop.outputs["r2"], run_alone(group)
    assert ids_of(shared) == ids_of(alone)
