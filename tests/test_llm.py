"""`LLM`: prompts in every form, order of results, refusals, chat, life and death."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import shutil
import signal
import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import generate, greedy, ids, open_llm
from support.models import ModelShop
from support.oracle import Oracle
from support.patches import on_call
from support.tiny_llama import edit_json
from support.zoo import PLAIN

from tpengine import LLM, BeamSearchParams, LLMEngine, SamplingParams, errors
from tpengine.config import EMBEDDED_MODEL
from tpengine.engine.output_processor import OutputProcessor
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tpengine.scheduling.scheduler import Scheduler

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
TIMEOUT_S = 120


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_the_common_script(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.finished
        assert output.error is None
        completion = output.outputs[0]
        assert len(completion.token_ids) <= 16  # the default of max_tokens
        assert completion.text
        assert completion.finish_reason in {"length", "stop"}
        assert completion.logprobs is None
        assert pickle.loads(pickle.dumps(output)) == output
    metrics = outputs[0].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time <= metrics.finished_time


def test_outputs_are_plain_data() -> None:
    metrics = RequestMetrics.of_arrival(7.0)
    completion = CompletionOutput(0, "x", (9,), -1.0, [{9: Logprob(-1.0, 1, "x")}])
    as_dict = dataclasses.asdict(RequestOutput("r", "p", [1], [None], [completion], False, metrics))
    logprob = {"logprob": -1.0, "rank": 1, "decoded_token": "x"}
    assert as_dict["outputs"][0].items() >= {"logprobs": [{9: logprob}], "token_ids": (9,)}.items()
    assert as_dict["metrics"]["last_token_time"] == 7.0
    assert not completion.finished()
    completion.finish_reason = "stop"
    assert completion.finished()


def test_every_form_of_a_prompt(llm: LLM) -> None:
    def answers(*prompts: Any, **more: Any) -> list[Any]:
        return llm.generate(*prompts, **more, sampling_params=greedy(12), use_tqdm=False)

    text = PROMPTS[0]
    (expected,) = answers(text)
    token_ids = expected.prompt_token_ids
    assert token_ids == llm.get_tokenizer().encode(text)
    for form, prompt in (
        ([text], text),
        ({"prompt": text}, text),
        (UserDict(prompt=text), text),
        ({"prompt_token_ids": token_ids}, None),
        ([{"prompt_token_ids": token_ids}], None),
        (token_ids, None),
        ([np.array(token_ids)], None),
    ):
        (output,) = answers(form)
        assert ids([output]) == ids([expected])
        assert (output.prompt, output.prompt_token_ids) == (prompt, token_ids)
    for ids_alone in (token_ids, [token_ids], [np.array(token_ids)]):
        assert ids(answers(prompt_token_ids=ids_alone)) == ids([expected])
    assert answers([text], prompt_token_ids=[token_ids])[0].prompt == text
    mixed = [text, {"prompt_token_ids": token_ids}, {"prompt": PROMPTS[1]}, token_ids]
    same = [answer == ids([expected])[0] for answer in ids(answers(mixed))]
    assert same == [True, True, False, True]
    with pytest.raises(InvalidPromptError, match=r"'input_ids'\]; did you mean prompt_token_ids\?"):
        llm.generate(llm.get_tokenizer()(text))
    with pytest.raises(InvalidPromptError, match=r"^prompts\[1\]: .* text, ids .*, got int"):
        llm.generate([text, 5])


def test_arguments_in_the_order_of_vllm(models: ModelShop) -> None:
    """Thirteen of the constructor, the others by name; and a priority for each prompt."""
    folder = str(models.folder(PLAIN, tokenizer=True))
    others = {"scheduling_policy": "priority", "max_num_seqs": 1, "num_device_blocks_override": 64}
    with LLM(
        folder, None, "slow", False, False, 1, "float32", None, None, None, 7, 0.9, 0, **others
    ) as llm:
        config = llm.llm_engine.model_config
        assert (config.seed, config.dtype, config.tokenizer_mode) == (7, "float32", "slow")
        assert llm.llm_engine.cache_config.num_cpu_blocks == 0
        assert llm.generate([], prompt_token_ids=[]) == []
        late, soon = llm.generate([[5], [6]], greedy(2), None, False, None, None, None, [3, -3])
        assert soon.metrics.finished_time < late.metrics.finished_time
        with pytest.raises(InvalidPromptError, match="a list of priority needs one per prompt"):
            llm.generate([[5], [6]], priority=[3])
    with pytest.raises(errors.ConfigError, match="LLM has no argument 'max_num_seq'; did you mean"):
        LLM(folder, max_num_seq=1)


def test_params_per_prompt_and_order_of_results(llm: LLM) -> None:
    """The first prompt takes longest, the results come in the order of the prompts all the same."""
    params = [greedy(40), greedy(3), greedy(20)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(tokens) for tokens in ids(outputs)] == [40, 3, 20]
    finished = [output.metrics.finished_time for output in outputs]
    assert finished[1] < finished[2] < finished[0]
    assert [output.prompt for output in outputs] == PROMPTS
    assert llm.generate([], greedy(), use_tqdm=False) == []
    with pytest.raises(InvalidPromptError, match=r"got 2 for 1 prompt$"):
        llm.generate(PROMPTS[0], params[:2])
    with pytest.raises(InvalidPromptError, match=r"got 2 for 3 prompts"):
        llm.generate(PROMPTS, params[:2])
    with pytest.raises(InvalidPromptError, match="got neither"):
        llm.generate()
    with pytest.raises(InvalidPromptError, match=r"equally many, got 3 and 1"):
        llm.generate(PROMPTS, greedy(), [[1, 2]])


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is two plus three?"}]
    outputs = llm.chat(messages, greedy(8), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert outputs[0].prompt_token_ids == wanted
    assert outputs[0].prompt == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert ids(llm.chat([messages, messages[:1]], greedy(8), use_tqdm=False)) == ids(outputs) * 2
    closed = llm.chat(messages, greedy(8), use_tqdm=False, add_generation_prompt=False)
    assert len(closed[0].prompt_token_ids) < len(wanted)
    with pytest.raises(InvalidPromptError, match=r"^prompts\[1\]: messages\[0\] has no 'content'"):
        llm.chat([messages, [{"role": "user"}]], greedy(8))
    good, bad = llm.chat([messages, []], greedy(8), use_tqdm=False, on_error="return")
    assert ids([good]) == ids(outputs)
    assert "messages is empty" in bad.error
    with pytest.raises(InvalidPromptError, match="ids or messages; got none"):
        llm.chat(None)
    with pytest.raises(errors.RequestError, match="chat_template_kwargs must be a dict, got 3"):
        llm.chat(messages, chat_template_kwargs=3)


def test_options_of_a_chat(llm: LLM) -> None:
    def prompt(content: Any, **options: Any) -> str:
        messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": content}]
        return llm.chat(messages, greedy(1), False, **options)[0].prompt

    parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]
    assert "It\nis" in prompt(parts, add_generation_prompt=False)
    open_end = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt("It is", **open_end).endswith("<|assistant|>\nIt is")
    template = "{{ tools[0].name }} {{ mood }} {{ messages[1].content }}"
    options = {"tools": [{"name": "add"}], "chat_template_kwargs": {"mood": "calm"}}
    assert prompt("It is", chat_template=template, **options) == "add calm It is"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(InvalidPromptError, match="reads text alone: docs/pictures"):
        prompt([parts[0], image])
    with pytest.raises(InvalidPromptError, match="continue_final_message"):
        prompt("It is", continue_final_message=True)
    with pytest.raises(errors.InvalidAdapterError, match="must be a LoRARequest, got 'x'"):
        prompt("It is", lora_request="x")


def test_a_forked_process_cannot_use_the_engine(llm: LLM) -> None:
    before = ids(llm.generate("Hello", greedy(5), use_tqdm=False))
    child = os.fork()
    if not child:
        signal.alarm(TIMEOUT_S)
        try:
            llm.generate("Hello", greedy(5), use_tqdm=False)
        except errors.EngineError as error:
            os._exit(7 if f"this is process {os.getpid()}" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ids(llm.generate("Hello", greedy(5), use_tqdm=False)) == before


def test_beam_search_is_that_of_generate(llm: LLM) -> None:
    params = SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=8)
    wanted = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    outputs = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=8))
    for output, expected in zip(outputs, wanted, strict=True):
        assert output.error is None
        for beam, completion in zip(output.sequences, expected.outputs, strict=True):
            assert beam.tokens == [*expected.prompt_token_ids, *completion.token_ids]
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
            assert beam.cum_logprob == completion.cumulative_logprob
    assert outputs[0].sequences[0].cum_logprob > outputs[0].sequences[2].cum_logprob
    question = llm.llm_engine.tokenizer.render_chat([{"role": "user", "content": "Two plus two?"}])
    ids_of = llm.get_tokenizer().convert_tokens_to_ids
    for is_shown in (False, True):
        params = BeamSearchParams(2, 64, include_stop_str_in_output=is_shown)
        best = llm.beam_search(question, params)[0].sequences[0]
        assert (best.tokens[-1] == ids_of("<|end|>")) == is_shown
    with pytest.raises(InvalidSamplingParamsError, match=r"temperature = 0\.0, got 0\.5"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(3, 8, temperature=0.5))
    with pytest.raises(InvalidSamplingParamsError, match="BeamSearchParams, or use_beam_search"):
        llm.beam_search(PROMPTS[0], SamplingParams())
    with pytest.raises(InvalidSamplingParamsError, match="beam_width must be an integer, got '2'"):
        BeamSearchParams("2", 4)


def test_parameters_that_the_model_recommends(models: ModelShop, tmp_path: Path) -> None:
    folder = shutil.copytree(models.folder(PLAIN), tmp_path / "model")
    wishes = {"temperature": 0.5, "top_k": 0, "top_p": 0.9, "max_new_tokens": 33, "num_beams": 2}
    edit_json(folder / "generation_config.json", lambda content: content.update(wishes))
    with open_llm(folder) as llm:
        wished = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=33)
        assert llm.get_default_sampling_params() == wished
        (output,) = llm.generate([[5, 6]], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 16, "generate keeps its own defaults"


@pytest.mark.parametrize("refresh_s", [0.0, 3600.0])
def test_progress_bar_moves_before_a_prompt_ends(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, refresh_s: float
) -> None:
    monkeypatch.setattr("tpengine.engine.progress_bar._REFRESH_S", refresh_s)
    llm.generate(PROMPTS[0], greedy(80), use_tqdm=True)
    drawn = capsys.readouterr().err.split("\r")
    before = [line for line in drawn if "0/1" in line and "output" in line]
    assert len(before) >= 70 if refresh_s == 0.0 else not before
    assert all(float(line.partition("output ")[2].split()[0]) > 0 for line in before[1:])
    assert "1/1" in drawn[-1]
    assert "tokens/s" in drawn[-1]
    llm.generate(PROMPTS, greedy(8), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_progress_bar_shows_refusals_apart(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for prompts, done in (([PROMPTS[0], "", PROMPTS[1]], "2/3"), ([""], "0/1")):
        llm.generate(prompts, greedy(4), on_error="return")
        last = capsys.readouterr().err.rpartition("Processed prompts")[2]
        assert done in last
        assert "refused 1," in last
    llm.generate(PROMPTS[0], greedy(4))
    assert "refused" not in capsys.readouterr().err


def test_stream_gives_the_text_in_pieces(llm: LLM) -> None:
    whole = texts(llm.generate(PROMPTS[0], greedy(24), use_tqdm=False))[0]
    pieces = list(llm.stream(PROMPTS[0], greedy(24)))
    assert len(pieces) > 10
    assert "".join(pieces) == whole
    stream = llm.stream(PROMPTS[0], greedy(24))
    next(stream)
    stream.close()  # a closed stream leaves no request in the engine
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert llm.llm_engine.num_free_blocks == llm.llm_engine.num_total_blocks
    with pytest.raises(errors.RequestError, match="empty"):
        list(llm.stream("", greedy(24)))
    with pytest.raises(InvalidSamplingParamsError, match="must be SamplingParams, got 3"):
        list(llm.stream(PROMPTS[0], 3))


def test_stream_that_another_caller_aborts(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], greedy(200))
    assert next(stream)
    llm.llm_engine.abort_request(str(llm.request_counter.counter - 1))
    with pytest.raises(errors.RequestAbortedError, match="aborted"):
        list(stream)
    with pytest.raises(InvalidPromptError, match="must be a string, or a list of such, got 4"):
        llm.llm_engine.abort_request(4)
    assert next(llm.stream(PROMPTS[0])), "parameters have defaults here, too"


def test_tokenizer_can_be_replaced(models: ModelShop) -> None:
    """A folder without a tokenizer works with ids; a tokenizer given later makes text of them."""
    from transformers import AutoTokenizer

    folder = models.folder(PLAIN)
    prompt = [7, 300, 41]
    with open_llm(folder) as llm:
        assert llm.get_tokenizer() is None
        bare = llm.generate(None, greedy(10), [prompt], use_tqdm=False)[0]
        assert bare.outputs[0].text == ""
        assert len(bare.outputs[0].token_ids) == 10
        with pytest.raises(InvalidPromptError, match="no tokenizer"):
            llm.generate(["Hello"], greedy(10), use_tqdm=False)
        with pytest.raises(InvalidSamplingParamsError, match="stop needs a tokenizer"):
            llm.generate(None, greedy(10, stop=["a"]), [prompt], use_tqdm=False)
        with pytest.raises(InvalidPromptError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "Hello"}])
        hf = AutoTokenizer.from_pretrained(models.folder(PLAIN, tokenizer=True))
        llm.set_tokenizer(hf)
        with pytest.raises(errors.ConfigError, match="one of transformers, got 3"):
            llm.set_tokenizer(3)
        assert llm.get_tokenizer() is llm.llm_engine.tokenizer.tokenizer is hf
        chosen = llm.generate(None, greedy(10), [prompt], use_tqdm=False)[0]
        assert chosen.outputs[0].token_ids == bare.outputs[0].token_ids
        assert chosen.outputs[0].text == hf.decode(bare.outputs[0].token_ids)
        llm.set_tokenizer(None)
        assert llm.get_tokenizer() is None


def test_tokenizer_of_another_folder(models: ModelShop) -> None:
    with_text = models.folder(PLAIN, tokenizer=True)
    with open_llm(models.folder(PLAIN), tokenizer=str(with_text)) as llm:
        assert llm.generate("abc", greedy(4), use_tqdm=False)[0].error is None


def test_shutdown_twice_and_never_again(models: ModelShop) -> None:
    llm = open_llm(models.folder(PLAIN))
    with llm as entered:
        assert entered is llm
        generate(llm, [[5, 6]], greedy(2))
    llm.shutdown()
    with pytest.raises(errors.EngineError, match="shut down"):
        llm.generate(None, greedy(2), [[5, 6]], use_tqdm=False)
    assert isinstance(llm.llm_engine, LLMEngine)
    llm.llm_engine.shutdown()


def test_an_engine_in_a_cycle_is_collected(models: ModelShop) -> None:
    """As in a notebook whose object holds both an engine and its own method."""

    class Service:
        def __init__(self) -> None:
            self.on_end = self.close
            self.llm = open_llm(models.folder(PLAIN))

        def close(self) -> None: ...

    service = Service()
    executor = weakref.ref(service.llm.llm_engine._executor)
    del service
    gc.collect()
    assert executor() is None


def test_an_engine_is_freed_at_once(models: ModelShop) -> None:
    """In a notebook that makes a second engine under the first one's name."""
    llm = open_llm(models.folder(PLAIN))
    generate(llm, [[5, 6]], greedy(2))
    executor = weakref.ref(llm.llm_engine._executor)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert executor() is None
    finally:
        gc.enable()


def test_engines_side_by_side(models: ModelShop, embedded_oracle: Oracle) -> None:
    folder = models.folder(PLAIN)
    oracle = models.oracle(folder)
    prompts = oracle.prompts((7, 33), seed=1)
    embedded = [[30, 31, 32, 33, 34], [400, 401, 402]]
    expected = [answer.token_ids for answer in oracle.answers(prompts)]
    other = [answer.token_ids for answer in embedded_oracle.answers(embedded)]
    with open_llm(folder) as left, open_llm(EMBEDDED_MODEL, block_size=8) as right:
        for llm, own in ((left, prompts), (right, embedded)):
            for number, prompt in enumerate(own):
                llm.llm_engine.add_request(str(number), None, greedy(), prompt_token_ids=prompt)
        done: list[Any] = [[], []]
        while left.llm_engine.has_unfinished_requests():
            for outputs, llm in zip(done, (left, right), strict=True):
                outputs += [output for output in llm.llm_engine.step() if output.finished]
        assert not right.llm_engine.has_unfinished_requests()
        assert [ids(outputs) for outputs in done] == [expected, other]
        left.shutdown()
        assert ids(generate(right, embedded, greedy())) == other


def interrupt_at(patch: pytest.MonkeyPatch, owner: type, name: str, number: int) -> list[Any]:
    """Sends a real SIGINT in one call of a method; returns a list with an entry for each call."""

    def interrupt(*_: Any) -> None:
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)

    calls = on_call(patch, owner, name, interrupt)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(Scheduler, "update", 3), (OutputProcessor, "add", 2)],
    ids=["in a step", "while prompts are added"],
)
def test_ctrl_c_drops_all_prompts(llm: LLM, owner: type, name: str, number: int) -> None:
    """The step is completed. A prompt that is half added is known to only one of two."""
    engine = llm.llm_engine
    expected = texts(llm.generate(PROMPTS, greedy(20), use_tqdm=False))
    with pytest.MonkeyPatch.context() as patch:
        calls = interrupt_at(patch, owner, name, number)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS * 100, greedy(20), use_tqdm=False)
    assert len(calls) == number
    assert engine.get_num_unfinished_requests() == 0
    assert not engine.has_unfinished_requests(), "no call waits for their ends"
    assert engine.num_free_blocks == engine.num_total_blocks
    assert texts(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == expected


@pytest.mark.parametrize("step", [2, 5])
def test_what_was_done_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A Ctrl-C in or after the step in which the first of three prompts, given last, was done."""
    params = [greedy(20), greedy(20), greedy(2)]
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.finished_outputs() == []
    with monkeypatch.context() as patch:
        interrupt_at(patch, OutputProcessor, "process", step)
        with pytest.raises(KeyboardInterrupt) as raised:
            llm.generate(PROMPTS, params, use_tqdm=False)
    assert texts(llm.finished_outputs()) == texts(expected[2:])
    assert raised.value.__notes__ == ["LLM.finished_outputs() has what was done: 1 of 3 prompts"]
    with pytest.raises(InvalidPromptError):
        llm.generate(None)
    assert llm.finished_outputs() == []


def test_a_prompt_that_the_tokenizer_cannot_follow_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = OutputProcessor.add

    def failing(processor: OutputProcessor, request: Any) -> None:
        add(processor, request)
        if request.prompt == PROMPTS[1]:
            raise ValueError("bytes must be in range")

    with monkeypatch.context() as patch:
        patch.setattr(OutputProcessor, "add", failing)
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False, on_error="return")
        with pytest.raises(InvalidPromptError, match=r"^prompts\[1\]: .* bytes must be in range"):
            llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "bytes must be in range" in outputs[1].error


def test_a_stream_survives_a_generate_during_it(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], greedy(12), use_tqdm=False)[0].outputs[0].text
    first, second = llm.stream(PROMPTS[0], greedy(12)), llm.stream(PROMPTS[0], greedy(12))
    text = next(first) + ""
    other = next(second)
    llm.generate(PROMPTS[1], greedy(30), use_tqdm=False)
    assert text + "".join(first) == whole
    assert other + "".join(second) == whole


def test_a_step_that_failed_ends_the_engine_with_its_cause(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(models.folder(PLAIN)) as broken:
        engine = broken.llm_engine
        for name in ("here", "gone"):
            engine.add_request(name, None, greedy(4), prompt_token_ids=[5])
        engine.abort_request("gone")
        monkeypatch.delattr(Scheduler, "update")
        with pytest.raises(AttributeError, match="update"):
            engine.step()
        with pytest.raises(errors.EngineDeadError, match="no attribute 'update'"):
            engine.step()
        with pytest.raises(errors.EngineDeadError, match="make a new one"):
            engine.add_request("two", None, greedy(4), prompt_token_ids=[5])
