"""`LLMEngine`: requests are added, aborted and finished at any moment."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest
from support.engines import complete, greedy, make_engine, run
from support.messages import said
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tpengine.config import RanksConfig, RayConfig
from tpengine.engine.stats import PreemptionLog, StatLoggerBase, Stats
from tpengine.errors import DuplicateRequestError, InvalidPromptError, RefusedNameError


def test_add_requests_and_step_until_done(engine: LLMEngine, prompt: list[int]) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    for i in range(3):
        engine.add_request(str(i), None, greedy(4 + i), prompt_token_ids=prompt)
    assert engine.get_num_unfinished_requests() == 3
    assert engine.get_model_config().vocab_size == 512
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
        assert engine.last_step.num_rows <= 3
        assert engine.last_step.step_s >= engine.last_step.model_s > 0
    assert finished == ["0", "1", "2"]
    assert engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_interval_merges_tokens_and_changes_none(
    models: ModelShop, prompt: list[int], expected: tuple[int, ...], n: int
) -> None:
    fields = {"temperature": 0.0 if n == 1 else 1.0, "seed": 5, "max_tokens": 10, "logprobs": 1}
    answers = [expected[:10]] if n == 1 else []
    sizes = {1: [1] * 10, 3: [1, 3, 3, 3], 4: [1, 4, 4, 1], 50: [1, 9]}
    for interval, wanted in sizes.items():
        reports: dict[str, list[Any]] = {kind.value: [] for kind in RequestOutputKind}
        with make_engine(models.folder(PLAIN, tokenizer=True), stream_interval=interval) as engine:
            for kind in reports:
                params = SamplingParams(n=n, ignore_eos=True, output_kind=kind, **fields)
                engine.add_request(kind, None, params, prompt_token_ids=prompt)
            for output in run(engine):
                reports[output.request_id].append(output)
        for outputs in reports.values():
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert all(o.finish_reason == "length" for o in outputs[-1].outputs)
        (final,) = (output.outputs for output in reports["final_only"])
        answers = answers or [sequence.token_ids for sequence in final]
        for index, answer in enumerate(answers):
            assert final[index].token_ids == answer
            assert len(final[index].logprobs) == 10
            deltas = [output.outputs[index] for output in reports["delta"]]
            assert [len(delta.token_ids) for delta in deltas] == wanted
            assert [len(delta.logprobs) for delta in deltas] == wanted
            assert tuple(token for delta in deltas for token in delta.token_ids) == answer
            assert "".join(delta.text for delta in deltas) == final[index].text
            whole = [output.outputs[index] for output in reports["cumulative"]]
            ends = itertools.accumulate(wanted)
            assert [part.token_ids for part in whole] == [answer[:end] for end in ends]
            assert whole[-1].text == final[index].text


def test_duplicate_id(engine: LLMEngine, prompt: list[int]) -> None:
    engine.add_request("twin", None, greedy(2), prompt_token_ids=prompt)
    with pytest.raises(DuplicateRequestError, match="'twin'"):
        engine.add_request("twin", None, greedy(9), prompt_token_ids=prompt)
    assert [len(o.outputs[0].token_ids) for o in run(engine) if o.finished] == [2]
    engine.add_request("twin", None, greedy(3), prompt_token_ids=prompt)  # free again at its end
    assert len(run(engine)[-1].outputs[0].token_ids) == 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 8])
def test_abort_at_any_moment(
    models: ModelShop, prompt: list[int], expected: tuple[int, ...], num_steps: int
) -> None:
    """Prompts of 33 tokens in chunks of 16: waiting, between chunks, just sampled, decoding."""
    folder = models.folder(PLAIN, tokenizer=True)
    with make_engine(folder, max_num_batched_tokens=16, max_num_seqs=2) as engine:
        for name in ("kept", "gone", "never started"):
            engine.add_request(name, None, greedy(12), prompt_token_ids=prompt)
        outputs = [output for _ in range(num_steps) for output in engine.step()]
        before = engine.num_free_blocks
        engine.abort_request(["gone", "never started", "unknown"])
        assert engine.get_num_unfinished_requests() == 1
        held = engine.num_total_blocks - engine.num_free_blocks
        assert held <= 3, "only the request that was kept holds blocks"
        if num_steps >= 4:
            assert engine.num_free_blocks > before
        engine.abort_request("gone")  # a second time changes nothing
        assert engine.has_unfinished_requests()
        outputs += run(engine)
        ends = {o.request_id: o.outputs[0] for o in outputs if o.finished}
        assert ends["kept"].token_ids == expected[:12]
        for name in ("gone", "never started"):
            assert ends[name].finish_reason == "abort"
            assert ends[name].token_ids == expected[: len(ends[name].token_ids)]
            assert sum(o.request_id == name and o.finished for o in outputs) == 1
        assert ends["never started"].token_ids == ()
        assert engine.num_free_blocks == engine.num_total_blocks


def test_abort_of_everything_is_still_reported(engine: LLMEngine, prompt: list[int]) -> None:
    engine.add_request("only", None, greedy(9), prompt_token_ids=prompt)
    engine.step()
    engine.abort_request("only")
    assert engine.get_num_unfinished_requests() == 0
    assert engine.has_unfinished_requests(), "there is an end to report"
    outputs = engine.step()
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [("only", "abort")]
    assert not engine.has_unfinished_requests()


def test_without_text(engine: LLMEngine, prompt: list[int], expected: tuple[int, ...]) -> None:
    completion = complete(engine, prompt, greedy(8, detokenize=False))
    assert (completion.text, completion.token_ids) == ("", expected[:8])


@pytest.mark.parametrize("detokenize", [True, False])
def test_logprobs_carry_text(engine: LLMEngine, prompt: list[int], detokenize: bool) -> None:
    asked = greedy(4, logprobs=2, prompt_logprobs=1, detokenize=detokenize)
    beams = replace(asked, use_beam_search=True, n=2, best_of=None)
    for number, params in enumerate((asked, beams)):
        engine.add_request(str(number), None, params, prompt_token_ids=prompt)
    for output in run(engine):
        for completion in output.outputs if output.finished else ():
            tokens = [*prompt, *completion.token_ids]
            logprobs = [*output.prompt_logprobs, *completion.logprobs]
            for token_id, entries in zip(tokens[1:], logprobs[1:], strict=True):
                text = engine.tokenizer.token_text(token_id) if detokenize else None
                assert entries[token_id].decoded_token == text
            assert min(len(entries) for entries in completion.logprobs) >= 2


def test_statistics_line(
    models: ModelShop, prompt: list[int], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("tpengine.engine.stats._LOG_INTERVAL_S", 0.0)
    caplog.set_level("INFO", "tpengine.engine.stats")
    args = EngineArgs(str(models.folder(PLAIN)), dtype="float32", num_device_blocks_override=64)
    with LLMEngine.from_engine_args(args) as engine, said(caplog) as messages:
        engine.add_request("one", None, greedy(3), prompt_token_ids=prompt)
        run(engine)
        engine.do_log_stats()
    lines = [message for message in messages if message.startswith("prefill")]
    assert len(lines) == 4
    for words in ("1 running, 0 waiting", "KV cache", "swap space 0.0 % used"):
        assert words in lines[0]
    assert lines[3].startswith("prefill 0.0 tokens/s, output 0.0 tokens/s; 0 running")


def test_a_preemption_is_logged(
    models: ModelShop, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    args = {"num_device_blocks_override": 9, "max_model_len": 130, "max_num_seqs": 7}
    engine = make_engine(models.folder(PLAIN), swap_space=0.01, **args)
    with engine, said(caplog) as messages:
        for index in range(4):
            engine.add_request(str(index), None, greedy(60), prompt_token_ids=prompt)
        run(engine)
        assert engine.stats().num_preemptions > 1
    line = next(message for message in messages if "preemption" in message)
    assert line.startswith("1 preemption since the start: ")
    assert "preemption_mode is swap" in line
    assert line.endswith("raise num_device_blocks_override (now 9), or lower max_num_seqs (now 7)")


@pytest.mark.parametrize(
    ("device", "args", "words"),
    [
        ("cuda", {"gpu_memory_utilization": 0.8}, "raise gpu_memory_utilization (now 0.8)"),
        ("cpu", {"cpu_kv_cache_space": 0.5}, "raise cpu_kv_cache_space (now 0.5 GiB)"),
        ("cpu", {"preemption_mode": "recompute"}, "raise cpu_kv_cache_space (now not set)"),
    ],
)
def test_preemptions_are_logged_every_ten_seconds(
    device: str, args: Any, words: str, models: ModelShop, monkeypatch: Any, caplog: Any
) -> None:
    log = PreemptionLog(EngineArgs(str(models.folder(PLAIN)), **args).create_engine_config(device))
    with said(caplog) as messages:
        for now, count in [(3.0, 1), (12.9, 5), (13.1, 7), (23.0, 8), (23.2, 9)]:
            with monkeypatch.context() as patch:
                patch.setattr("time.monotonic", lambda now=now: now)
                log.record(count)
    assert [line.split()[0] for line in messages] == ["1", "7", "9"]
    assert all(words in line for line in messages)


def test_configs_have_the_names_of_vllm(engine: LLMEngine) -> None:
    model, parallel = engine.model_config, engine.parallel_config
    assert model is engine.get_model_config()
    assert (model.hf_config.vocab_size, model.hf_config["vocab_size"]) == (512, 512)
    assert not hasattr(model.hf_config, "no_such_field")
    assert pickle.loads(pickle.dumps(model)).hf_config.vocab_size == 512
    sizes = (model.get_vocab_size(), model.get_hidden_size(), model.get_head_size())
    assert sizes == (512, PLAIN.hidden_size, PLAIN.head_dim)
    assert model.get_num_layers(parallel) == PLAIN.num_layers
    assert model.get_num_attention_heads(parallel) == PLAIN.num_heads
    assert model.get_num_kv_heads(parallel) == model.get_total_num_kv_heads() == PLAIN.num_kv_heads
    four = replace(parallel, tensor_parallel_size=4)
    assert model.get_num_kv_heads(four) == max(1, PLAIN.num_kv_heads // 4)
    assert parallel is engine.get_parallel_config()
    assert (parallel.world_size, parallel.pipeline_parallel_size) == (1, 1)
    assert parallel.distributed_executor_backend is None
    processes = replace(parallel, ranks=RanksConfig())
    assert processes.distributed_executor_backend == "mp"
    assert replace(processes, ray=RayConfig()).distributed_executor_backend == "ray"
    cache = engine.cache_config
    assert (cache.num_gpu_blocks, cache.num_gpu_blocks_override) == (256, 256)
    assert cache.cache_dtype == "auto"
    scheduler = engine.scheduler_config
    assert scheduler is engine.get_scheduler_config()
    assert scheduler.chunked_prefill_enabled
    assert engine.get_lora_config() is None
    assert engine.list_loras() == set()


def test_an_arrival_time_is_a_number(engine: LLMEngine) -> None:
    with pytest.raises(InvalidPromptError, match=r"arrival_time is in seconds, got \[5, 6\]"):
        engine.add_request("one", "text", greedy(1), arrival_time=[5, 6])
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("name", "advice"), [("pin_lora", "requests name"), ("scheduler", "stats")]
)
def test_what_is_not_offered_is_refused_by_name(engine: LLMEngine, name: str, advice: str) -> None:
    with pytest.raises(RefusedNameError, match=f"^LLMEngine.{name} is not offered: .*{advice}"):
        getattr(engine, name)
    assert not hasattr(engine, name)
    with pytest.raises(AttributeError, match="object has no attribute 'no_such_name'"):
        engine.no_such_name()


class Told(StatLoggerBase):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(local_interval=1.0)
        self.stats: list[Stats] = []

    def log(self, stats: Stats) -> None:
        self.stats.append(stats)


def test_loggers(models: ModelShop, prompt: list[int], caplog: pytest.LogCaptureFixture) -> None:
    logger = Told()
    args = EngineArgs(str(models.folder(PLAIN)), dtype="float32", num_device_blocks_override=64)
    with LLMEngine.from_engine_args(args, None, {"told": logger}) as engine:
        assert not engine.log_stats, "a logger of the user replaces the engine's own line"
        engine.add_request("one", None, greedy(3), prompt_token_ids=prompt)
        long = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
        engine.add_request("two", None, long, prompt_token_ids=[7, 8])
        run(engine)
        with pytest.raises(KeyError, match="'told'"):
            engine.add_logger("told", logger)
        assert sum(stats.num_prompt_tokens_iter for stats in logger.stats) == len(prompt) + 2
        assert sum(stats.num_generation_tokens_iter for stats in logger.stats) == 3 + 2 * 5
        assert [len(stats.time_to_first_tokens_iter) for stats in logger.stats] == [2, 0, 0, 0, 0]
        assert [len(stats.time_per_output_tokens_iter) for stats in logger.stats] == [0, 2, 2, 1, 1]
        assert [stats.num_running_sys for stats in logger.stats] == [2, 2, 1, 1, 0]
        assert logger.stats[0].gpu_cache_usage_sys > logger.stats[-1].gpu_cache_usage_sys
        assert logger.stats[2].num_prompt_tokens_requests == [len(prompt)]
        last = logger.stats[-1]
        assert (last.num_generation_tokens_requests, last.n_requests) == ([5, 5], [2])
        assert (last.finished_reason_requests, last.best_of_requests) == (["length"] * 2, [2])
        assert len(last.time_e2e_requests) == 1
        engine.add_logger("broken", object())
        with said(caplog):
            engine.do_log_stats()
            engine.do_log_stats()
        assert len(logger.stats) == 7, "an error of another logger does not matter"
        assert sum(bool(record.exc_info) for record in caplog.records) == 1
        engine.remove_logger("told")
        engine.add_request("three", None, greedy(1), prompt_token_ids=prompt)
        run(engine)
        assert len(logger.stats) == 7
        with pytest.raises(KeyError):
            engine.remove_logger("told")
