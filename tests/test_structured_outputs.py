"""Outputs that follow a schema, an expression, a choice or a grammar; through the offline API."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import jsonschema
import pytest
import torch
from executor.ray_engines import executor_of
from support.byte_llama import make_engine, run, write
from support.engines import serve
from support.json_suite import closed, suite_schemas
from support.oracle import Oracle
from support.patches import on_call
from support.step_log import log_steps
from tpengine.model_executor.guided_decoding.guided_fields import GuidedDecodingRequest

from tpengine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tpengine.errors import InvalidSamplingParamsError
from tpengine.scheduling.drafter import RowPrices
from tpengine.structured import grammars
from tpengine.structured.constraints import Thinking, to_grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f=1>", "schema": {"const": 5}, "end": "</f>"}], "triggers": ["<"]}
CHAIN = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(6000)), "a6000: /[a&&b]/"])
"""Rules so deep that the library needs more stack than a thread has, and that allow no text."""


def generate(llm: LLM, **params: Any) -> list[RequestOutput]:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 200, **params}
    return llm.generate("Once upon", SamplingParams(**fields), use_tqdm=False)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    return True


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-c]{3,5}-x"}, "[a-c]{3,5}-x"),
    ({"choice": ["yes", 'n"o\\', "été"]}, '(yes|n"o\\\\|été)'),
    ({"grammar": 'start: "a" B\nB: /[0-9]{1,4}/'}, "a[0-9]{1,4}"),
    ({"grammar": 'root ::= "a" [b-d]{1,4}'}, "a[b-d]{1,4}"),
    ({"json": '{"enum": [1, [true]]}'}, r"(1|\[\s*true\s*\])"),
    ({"json": {"const": [1, 2]}, "disable_any_whitespace": True}, r"\[1,2\]"),
    ({"json": {"const": [1, 2]}, "whitespace_pattern": "_"}, r"\[_?1_?,_?2_?\]"),
]
OTHERS: list[dict[str, Any]] = [
    {"n": 3, "logprobs": 1},
    {},
    {"best_of": 3, "use_beam_search": True, "temperature": 0.0, "seed": None},
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {5: 5.0}},
    {"ignore_eos": True, "top_k": 3},
]


@pytest.mark.parametrize(
    ("others", "constraint", "pattern"),
    [
        pytest.param(
            *(others, constraint, pattern),
            id=f"{others}-{constraint}-{pattern}",
            marks=[] if column in (0, 1 + row % 4) else pytest.mark.soak,
        )
        for row, (constraint, pattern) in enumerate(CONSTRAINTS)
        for column, others in enumerate(OTHERS)
    ],
)
def test_each_output_matches(
    llm: LLM, others: dict[str, Any], constraint: dict[str, Any], pattern: str
) -> None:
    (output,) = generate(llm, structured_outputs=constraint, **others)
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text), completion.text


def test_where_a_bias_leads(llm: LLM) -> None:
    """To the end of an object, and to tags in free text."""
    for constraint, favoured, pattern in (
        (StructuredOutputsParams(json_object=True), {'"': 12.0, "}": 12.0}, r'\{.*".*\}'),
        ({"structural_tag": TAG}, {"<": 40.0}, r"(<f=1>\s*5</f>){3}.*"),
    ):
        bias = {llm.get_tokenizer().encode(text)[0]: more for text, more in favoured.items()}
        (output,) = generate(llm, structured_outputs=constraint, logit_bias=bias)
        text = output.outputs[0].text
        assert re.fullmatch(pattern, text, re.DOTALL), text
        assert '"' not in favoured or isinstance(json.loads(text), dict)


def test_an_output_cut_by_its_length_is_a_beginning(llm: LLM) -> None:
    engine = llm.llm_engine
    params = StructuredOutputsParams(json=PERSON)
    for length in range(1, 12):
        (output,) = generate(llm, structured_outputs=params, max_tokens=length)
        assert output.outputs[0].finish_reason == "length"
        matcher = engine.tokenizer.vocabulary(engine.model_config).matcher(
            to_grammar(params, Thinking.NONE, [])
        )
        assert matcher.consume_tokens(list(output.outputs[0].token_ids))
        assert not matcher.is_accepting()


def test_detours_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption, chunks, drafts, and other requests that start at the same time."""
    kinds = [
        {"json": PERSON, "disable_any_whitespace": True},
        {"regex": "([a-z]{2,9} ){4}"},
        {"choice": ["one long answer of several words", "two"]},
    ]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_outputs=kinds[i % 3])
        for i in range(18)
    ]
    beams = {"use_beam_search": True, "best_of": 4, "temperature": 0.0, "max_tokens": 40}
    params[4] = SamplingParams(**beams, structured_outputs={"regex": "[a-f ]{9,30}!"})
    prompts = [f"Number {i}: " + "very " * (7 * i % 40) for i in range(18)]
    args: dict[str, Any] = {"dtype": "float32", "max_model_len": 192, "block_size": 8}
    with LLM(**args) as llm:
        calm = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: (1.0, 0.02))
    with LLM(**args, speculative_model="[suffix]") as llm:
        for _ in range(2):
            ahead = llm.generate(prompts, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in ahead] == [o.outputs[0].token_ids for o in calm]
        drafts = llm.llm_engine.stats().drafts
    assert drafts["grammar", 0].num_accepted > 10
    assert drafts["earlier", 0].num_accepted > 10
    args |= {"max_num_batched_tokens": 16, "max_num_seqs": 16, "num_device_blocks_override": 24}
    for mode in ("swap", "recompute"):
        with log_steps() as log, LLM(**args, preemption_mode=mode) as llm:
            tight = llm.generate(prompts, params, use_tqdm=False)
        log.assert_only(mode, at_least=3)
        for before, after in zip(calm, tight, strict=True):
            assert before.outputs[0].token_ids == after.outputs[0].token_ids
    whole = [o.outputs[0] for o in tight[::3] if o.outputs[0].finish_reason == "stop"]
    assert len(whole) >= 3
    assert all(is_valid(completion.text, PERSON) for completion in whole)


def test_greedy_tokens_are_those_of_masked_transformers(tmp_path_factory: Any) -> None:
    """The oracle tries every token: it is allowed if a choice begins with the text then."""
    folder = write(tmp_path_factory.mktemp("grammar"))
    choices = ["xyz", "xq", "zebr", "zoo", "zoology"]
    with make_engine(folder) as engine:
        tokenizer = engine.tokenizer
        texts = [tokenizer.token_text(i) for i in range(engine.model_config.vocab_size)]
        (end_id,) = tokenizer.end_token_ids(engine.model_config)

        def only_choices(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            text = "".join(texts[i] for i in ids[length:] if i != end_id)
            edited = torch.full_like(logits, -torch.inf)
            for i, piece in enumerate(texts):
                is_text = i not in tokenizer.special_token_ids and piece != ""
                if (i == end_id and text in choices) or (
                    is_text and any(choice.startswith(text + piece) for choice in choices)
                ):
                    edited[i] = logits[i]
            return edited

        oracle = Oracle(folder)
        params = SamplingParams(
            temperature=0.0, max_tokens=20, structured_outputs={"choice": choices}
        )
        for length in (3, 20, 40):
            for prompt in oracle.random_prompts([length] * 3, seed=length):
                (output,) = run(engine, [(prompt, params)])
                ids = output.outputs[0].token_ids
                assert ids[-1] == end_id
                oracle.assert_likeliest([prompt], [ids], only_choices)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({}, "exactly one of json, .* got none of them"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regx": "a"}, r"no field \['regx'\]; its fields are json"),
        ({"regex": 5}, "structured_outputs.regex must be a text, got 5"),
        ({"regex": "(a"}, "refused: .*unclosed group"),
        ({"json": "{"}, "structured_outputs.json is no JSON"),
        ({"json": [1]}, "structured_outputs.json must be a JSON object"),
        ({"json": {"type": "foo"}}, "refused: Invalid type: foo"),
        ({"json": {"not": {}}}, r'refused: Unimplemented keys: \["not"\]'),
        ({"json": {"items": {"uniqueItems": True}}}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"json": {"propertyNames": {"pattern": "a"}}}, r'Unimplemented keys: \["propertyNames"\]'),
        ({"choice": "ab"}, "structured_outputs.choice must be a list of texts"),
        ({"choice": ["a", ""]}, "must be a text that is not empty"),
        ({"grammar": "start: foo"}, 'refused: .*unknown name: "foo"'),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar cannot be read: "),
        ({"grammar": CHAIN}, "refused: no text fulfils it"),
        ({"regex": "a" * 600_000}, "has 600103 bytes, more than 524288"),
        ({"regex": "\ud800"}, "outputs.regex cannot be read: .*surrogates"),
        ({"json": '{"const": "\\ud800"}'}, "outputs.json cannot be read: .*ud800"),
        ({"json": {"minimum": 10**400}}, "outputs.json cannot be read: .*10000"),
        ({"structural_tag": {"format": {}}}, "the field format, which is not served"),
        ({"structural_tag": {**TAG, "triggers": ["g"]}}, "each begin starts with one"),
        ("a", "structured_outputs must be StructuredOutputsParams or a dict"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_constraint_is_an_error_of_its_request(llm: LLM, constraint: Any, words: str) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=f"(?s){words}"):
        generate(llm, structured_outputs=constraint)
    assert generate(llm, max_tokens=2)[0].finished


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#/$defs/a"}, False], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"properties": {"b": {"type": "array", "items": {"$ref": "#/properties/b"}, "minItems": 1}},
     "type": "object", "required": ["b"]},
    {"type": "object", "patternProperties": {"^a": {"const": 1}, "b$": {"const": 2}}},
    {"regex": "b[a&&b]"},
]  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_schema_without_an_end_is_refused_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], thinks: bool
) -> None:
    hf = llm.get_tokenizer()
    if thinks:
        monkeypatch.setattr(hf, "chat_template", hf.chat_template + "{# <think> #}")
    constraint = schema if "regex" in schema else {"json": schema}
    held = SamplingParams(max_tokens=4, structured_outputs=constraint)
    with pytest.raises(InvalidSamplingParamsError, match="structured_outputs"):
        llm.chat([{"role": "user", "content": "a"}], held, use_tqdm=False)


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINTS[:4])
def test_a_complete_output_ends_before_min_tokens(
    llm: LLM, constraint: dict[str, Any], pattern: str
) -> None:
    for others in ({"n": 2}, {"ignore_eos": True, "stop_token_ids": [70]}):
        (output,) = generate(llm, structured_outputs=constraint, min_tokens=50, **others)
        for completion in output.outputs:
            assert completion.finish_reason == "stop", output.error
            assert re.fullmatch(pattern, completion.text)


def test_min_tokens_holds_where_the_constraint_allows_more(llm: LLM) -> None:
    engine = llm.llm_engine
    ends = dict.fromkeys(engine.tokenizer.end_token_ids(engine.model_config), 50.0)
    for count in (0, 9):
        params = {"structured_outputs": {"regex": "[a-z ]*"}, "min_tokens": count}
        (output,) = generate(llm, logit_bias=ends, **params)
        assert output.outputs[0].finish_reason == "stop"
        assert len(output.outputs[0].token_ids) == count + 1


@pytest.mark.parametrize(
    ("limit", "value", "constraint"),
    [
        ("initial_lexer_fuel", 100, {"json_object": True}),
        ("max_grammar_size", 20, {"json": PERSON}),
        ("max_lexer_states", 60, {"regex": "[a-z]*[aeiou][a-z ]{12}!"}),
        ("step_max_items", 5, {"json": PERSON}),
        ("max_items_in_row", 1, {"json_object": True}),
    ],
)
def test_a_limit_is_named_and_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, constraint: dict[str, Any]
) -> None:
    params = [
        SamplingParams(max_tokens=100, seed=1, structured_outputs=value)
        for value in (constraint, {"regex": "[ab]{3}"})
    ]
    with LLM(dtype="float32", cpu_kv_cache_space=0.05) as llm:
        generate(llm, structured_outputs=params[1].structured_outputs)
        monkeypatch.setattr(grammars, "LIMITS", {limit: value})
        hard, easy = llm.generate(["Hello"] * 2, params, use_tqdm=False, on_error="return")
        (short,) = generate(llm, max_tokens=20, min_tokens=9, allowed_token_ids=[0])
    assert hard.outputs[0].finish_reason == "error"
    assert f"(limit {limit} of llguidance); give a smaller" in (hard.error or "")
    assert re.fullmatch("[ab]{3}", easy.outputs[0].text)
    assert "structured_outputs, allowed_token_ids, bad_words, min_tokens" in (short.error or "")
    assert isinstance(short.failure, InvalidSamplingParamsError), "the client can change it"


def test_grammars_are_compiled_once_and_the_latest_are_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = on_call(monkeypatch, grammars.Vocabulary, "_compile")
    for _ in range(3):
        generate(llm, structured_outputs={"regex": "once"})
    assert len(compiled) == 1
    for number in range(64):
        generate(llm, structured_outputs={"regex": f"other{number}"})
    generate(llm, structured_outputs={"regex": "other0"})
    assert len(compiled) == 65
    generate(llm, structured_outputs={"regex": "once"})
    assert len(compiled) == 66


@pytest.mark.parametrize("special", [[], ["<|user|>"]])
def test_the_grammar_starts_after_the_reasoning(llm: LLM, special: list[str]) -> None:
    tokenizer = llm.llm_engine.tokenizer
    vocabulary = tokenizer.vocabulary(llm.llm_engine.model_config)
    params = StructuredOutputsParams(regex="yes|no")
    for thinking, text, fits in (
        (Thinking.NONE, "yes", True),
        (Thinking.NONE, "<think>a</think>yes", False),
        (Thinking.ALLOWED, "yes", True),
        (Thinking.ALLOWED, "<think>no, </thi\n or yes</think>no", True),
        (Thinking.ALLOWED, "<think>no", False),
        (Thinking.BEGUN, "yes", False),
        (Thinking.BEGUN, "so be it</think>yes", True),
    ):
        matcher = vocabulary.matcher(to_grammar(params, thinking, special))
        ids = tokenizer.encode(text, add_special_tokens=False)
        took_all = matcher.try_consume_tokens(ids) == len(ids)
        assert (took_all and matcher.is_accepting()) == fits, (thinking, text)


def test_a_chat_with_a_model_that_reasons(llm: LLM) -> None:
    """With tags in its template an answer may begin with reasoning. If the prompt ends with the
    opening tag, the answer does begin so; if it ends with the closing one, it does not."""
    hf = llm.get_tokenizer()
    template, question = hf.chat_template, [{"role": "user", "content": "Is it so?"}]
    held = SamplingParams(max_tokens=60, temperature=0.0, structured_outputs={"choice": ["yes"]})
    bias = dict.fromkeys(hf.encode("<think>", add_special_tokens=False), 40.0)
    free = SamplingParams(**{**vars(held), "logit_bias": bias, "max_tokens": 2})
    try:
        hf.chat_template = template + "{# <think> #}"
        assert llm.chat(question, held, use_tqdm=False)[0].outputs[0].text == "yes"
        assert llm.chat(question, free, use_tqdm=False)[0].outputs[0].text.startswith("<")
        hf.chat_template = template + "<think></think>"
        assert llm.chat(question, free, use_tqdm=False)[0].outputs[0].text.startswith("y")
        hf.chat_template = template + "<think>"
        text = llm.chat(question, held, use_tqdm=False)[0].outputs[0].text
        assert text.partition("</think>")[2] in ("", "yes")
        assert text != "yes"
    finally:
        hf.chat_template = template


def test_the_request_of_vllm_0_5_4(llm: LLM) -> None:
    wanted = {"guided_choice": ["left", "right"], "guided_decoding_backend": "outlines"}
    for request in (wanted, GuidedDecodingRequest(**wanted)):
        params = SamplingParams(temperature=1.0, seed=2)
        (output,) = llm.generate("Turn ", params, guided_options_request=request, use_tqdm=False)
        assert output.outputs[0].text in ("left", "right")
        assert params.structured_outputs is None


@pytest.mark.check
def test_a_hundred_schemas_of_the_suite() -> None:
    """At temperature 1, with a rank killed, and a cache so small that sequences are preempted, each
    output that ends with stop is valid."""
    schemas, refused = {}, {}
    args: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2, "executor": "processes"}
    with LLM(**args, block_size=8, num_device_blocks_override=130, max_model_len=1024) as llm:
        for name, schema in suite_schemas():
            bounded = closed(schema)
            key = json.dumps(bounded, sort_keys=True)
            if key not in schemas and key not in refused and len(schemas) < 100:
                try:
                    generate(llm, max_tokens=1, structured_outputs={"json": bounded})
                    schemas[key] = name
                except InvalidSamplingParamsError as error:
                    refused[key] = f"{name}: {str(error).partition('refused: ')[2][:80]}"
        print(f"{len(refused)} schemas are refused:", *refused.values(), sep="\n")
        params = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=800,
                structured_outputs={"json": json.loads(key), "disable_any_whitespace": True},
            )
            for seed, key in enumerate(schemas)
        ]
        engine = llm.llm_engine
        victims = [executor_of(engine).places[1].pid]

        def kill_a_rank() -> None:
            if engine.get_num_unfinished_requests() <= 70 and victims:
                os.kill(victims.pop(), signal.SIGKILL)

        prompt = engine.tokenizer.encode("Here is one: ")
        with log_steps() as log:
            outputs = serve(engine, [prompt] * 100, params, after_step=kill_a_rank)
        assert engine.recoveries
    assert log.num_preemptions >= 5
    valid = [
        is_valid(output.outputs[0].text, json.loads(key))
        for output, key in zip(outputs, schemas, strict=True)
        if output.outputs[0].finish_reason == "stop"
    ]
    print(f"{len(valid)} of 100 end with stop")
    assert len(valid) >= 95
