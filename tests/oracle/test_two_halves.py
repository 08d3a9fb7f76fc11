"""Models with an encoder and a decoder against transformers: tokens and probabilities."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import greedy, open_engine, open_llm, serve
from support.small_barts import (
    FAMILIES,
    MAX_POSITIONS,
    START,
    assert_right,
    distance,
    encoder_prompts,
    logits_after,
    serve_preempted,
    transformers_bart,
    write_bart,
)
from support.tiny_llama import byte_level_tokenizer, edit_json
from transformers import BartModel

from tpengine import SamplingParams
from tpengine.errors import CacheSizeError, ConfigError, InvalidPromptError
from tpengine.server.http.write import AnswerWriter, Style, usage

LENGTHS = [1, 60, 2, 17, 33, 5, 48, 16, 60, 9, 32, 1]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled, 1 and 3 layers": {
        "scale_embedding": True,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "forced_bos_token_id": 7,
        "activation_function": "relu",
    },
    "8 heads": {
        "d_model": 128,
        "init_std": 0.05,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_layers": 3,
        "forced_bos_token_id": START,
    },
} | {family: {"family": family} for family in FAMILIES if family != "Bart"}


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bart(tmp_path_factory.mktemp("bart"))


def of_ids(encoder: Sequence[int], decoder: Sequence[int] | None = None) -> dict[str, Any]:
    prompt: dict[str, Any] = {"encoder_prompt": {"prompt_token_ids": list(encoder)}}
    if decoder is not None:
        prompt["decoder_prompt"] = {"prompt_token_ids": list(decoder)}
    return prompt


def start_of(model: Any) -> list[int]:
    """The ids before each output."""
    files = model.generation_config
    forced = files.forced_bos_token_id
    return [files.decoder_start_token_id] + ([] if forced is None else [forced])


def as_transformers(model: Any, prompt: Sequence[int], **options: Any) -> list[list[int]]:
    """Outputs of its `generate` without the first ids and what pads them."""
    count = len(start_of(model))
    options |= {"do_sample": False, "pad_token_id": 1, "max_new_tokens": 11 + count}
    rows = model.generate(torch.tensor([list(prompt)]), **options)[:, count:].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    lengths = [next((n for n, x in enumerate(row, 1) if x in ends), None) for row in rows]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_ragged_crowd(tmp_path: Path, name: str) -> None:
    """In one step, and in steps that each hold one of the long prompts; with the decoder's first
    token, and with prompts of the decoder that are computed in parts."""
    write_bart(tmp_path, **VARIANTS[name])
    model, prompts = transformers_bart(tmp_path), encoder_prompts(LENGTHS, seed=1)
    begins = encoder_prompts([30, 3, 50, 12], seed=2)
    for options in ({}, {"max_num_batched_tokens": MAX_POSITIONS + 1, "block_size": 8}):
        with open_llm(tmp_path, **options) as llm:
            outputs = llm.generate([of_ids(p) for p in prompts], greedy(16), use_tqdm=False)
            assert [output.prompt_token_ids for output in outputs] == [start_of(model)] * len(
                prompts
            )
            assert [output.encoder_prompt_token_ids for output in outputs] == prompts
            assert_right(model, outputs)
            begun = [of_ids(*pair) for pair in zip(prompts, begins, strict=False)]
            outputs = llm.generate(begun, greedy(16), use_tqdm=False)
            assert [output.prompt_token_ids[1:] for output in outputs] == begins
            assert_right(model, outputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams_as_transformers(tmp_path: Path, family: str, num_beams: int) -> None:
    """Whose lengths differ, so that it counts what `length_penalty` counts."""
    write_bart(tmp_path, family)
    ends = {"eos_token_id": [START, *range(40, 200)]}
    edit_json(tmp_path / "generation_config.json", lambda fields: fields.update(ends))
    model, prompts = transformers_bart(tmp_path), encoder_prompts([3, 20, 41, 60], seed=3)
    params = SamplingParams(n=num_beams, use_beam_search=True, temperature=0.0, max_tokens=12)
    with open_llm(tmp_path) as llm:
        outputs = llm.generate([of_ids(p) for p in prompts], params, use_tqdm=False)
        greedily = SamplingParams(temperature=0.0, max_tokens=12)
        plain = llm.generate([of_ids(p) for p in prompts], greedily, use_tqdm=False)
    beams = {"num_beams": num_beams, "num_return_sequences": num_beams, "early_stopping": False}
    for prompt, output, alone in zip(prompts, outputs, plain, strict=True):
        answers = [list(beam.token_ids) for beam in output.outputs]
        assert answers == as_transformers(model, prompt, **beams)
        assert [list(alone.outputs[0].token_ids)] == as_transformers(model, prompt, num_beams=1)


@pytest.mark.parametrize(
    ("family", "tp_size", "chunked"),
    [("Bart", 2, False), ("Bart", 4, True), *((name, 2, True) for name in list(FAMILIES)[1:])],
)
def test_ranks(tmp_path: Path, family: str, tp_size: int, chunked: bool) -> None:
    write_bart(tmp_path, family)
    prompts = [of_ids(p) for p in encoder_prompts(LENGTHS, seed=4)]
    with open_engine(tmp_path, tp_size, enable_chunked_prefill=chunked) as engine:
        assert_right(transformers_bart(tmp_path), serve(engine, prompts, greedy(12)))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("kind", ["greedy", "n", "best_of", "beams"])
def test_preemption(bart: Path, mode: str, kind: str) -> None:
    fields: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "n": {"n": 2, "top_p": 0.9},
        "best_of": {"n": 1, "best_of": 3},
        "beams": {"n": 2, "use_beam_search": True, "temperature": 0.0},
    }
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, **fields[kind])
        for seed in range(6)
    ]
    prompts = [of_ids(p) for p in encoder_prompts([40, 9, 33, 60, 1, 22], seed=5)]
    outputs = serve_preempted(bart, prompts, params, mode, max_model_len=64)
    assert_right(transformers_bart(bart), outputs, is_greedy=kind == "greedy")
    assert all(len(output.outputs) == params[0].n for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps(tmp_path: Path, family: str) -> None:
    """The bits of steps that run op by op, with forks and rows that come and go."""
    write_bart(tmp_path, family)
    prompts = [of_ids(p) for p in encoder_prompts(LENGTHS, seed=8)]
    params = [
        SamplingParams(n=1 + seed % 2, seed=seed, max_tokens=4 + 2 * seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    answers = []
    for enforce_eager in (True, False):
        options: dict[str, Any] = {"enforce_eager": enforce_eager, "max_num_seqs": 6}
        with open_llm(tmp_path, **options) as llm:
            (ledger,) = llm.llm_engine.stats().ledgers
            assert (ledger.graphs_bytes == 0) == enforce_eager
            outputs = llm.generate(prompts, params, use_tqdm=False)
        completions = [completion for output in outputs for completion in output.outputs]
        answers.append([(c.token_ids, c.cumulative_logprob) for c in completions])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("form", "most"), [("int8", 0.025), ("int4", 0.5)])
def test_rounded_weights(tmp_path: Path, form: str, most: float) -> None:
    """Close to those that are not rounded, and not equal."""
    bart = write_bart(tmp_path, init_std=0.1)
    prompts = [of_ids(p) for p in encoder_prompts(LENGTHS, seed=6)]
    with open_llm(bart, quantization=form) as llm:
        outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
    model = transformers_bart(bart)
    distances = [
        distance(model, output, input_ids=torch.tensor([output.encoder_prompt_token_ids]))
        for output in outputs
    ]
    assert 0.0 < sum(distances) / len(distances) < most


def test_texts(bart: Path, tmp_path: Path) -> None:
    """What a user types, and the texts of the outputs; a bare model without a head's bias."""
    BartModel.from_pretrained(bart).save_pretrained(tmp_path)
    byte_level_tokenizer(["ab"], [("a", "b")]).save_pretrained(tmp_path)
    model = transformers_bart(bart)
    with open_llm(tmp_path) as llm:
        tokenizer = llm.get_tokenizer()
        prompts: list[Any] = [
            "a cab",
            {"encoder_prompt": "a cab"},
            {"encoder_prompt": {"prompt": "a cab"}, "decoder_prompt": None},
            {"encoder_prompt": {"prompt_token_ids": tokenizer.encode("a cab")}},
            {"encoder_prompt": "a cab", "decoder_prompt": "abba"},
        ]
        *alike, begun = llm.generate(prompts, greedy(8, logprobs=0), use_tqdm=False)
        num_counted = llm.llm_engine.stats().prompt_tokens
    assert len({output.outputs[0].token_ids for output in alike}) == 1
    assert [output.encoder_prompt for output in alike] == ["a cab"] * 3 + [None]
    assert [(o.prompt, o.prompt_token_ids) for o in alike] == [(None, [START])] * 4
    own = tokenizer.encode("abba", add_special_tokens=False)
    assert (begun.prompt, begun.prompt_token_ids) == ("abba", [START, *own])
    writer = AnswerWriter(Style(is_chat=False, streams=False, echo=True), {})
    (choice,), _ = asyncio.run(writer.write_whole(alike[0]))
    assert choice["text"] == "a cab" + alike[0].outputs[0].text
    num_tokens = len(tokenizer.encode("a cab")) + 1
    assert usage([writer])["prompt_tokens"] == alike[0].num_prompt_tokens == num_tokens
    assert num_counted == 4 * num_tokens + begun.num_prompt_tokens
    bias = model.final_logits_bias[0]
    for output in (alike[0], begun):
        (completion,) = output.outputs
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        encoder = torch.tensor([output.encoder_prompt_token_ids])
        ids = output.prompt_token_ids, completion.token_ids
        logits = logits_after(model, *ids, input_ids=encoder) - bias
        assert tuple(logits.argmax(1).tolist()) == completion.token_ids


def test_refusals(bart: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"task": "embed"}, "task = 'embed' does not fit BartForConditionalGeneration"),
        ({"enable_lora": True}, "enable_lora does not fit"),
        ({"speculative_model": "[ngram]"}, "speculative_model = '[ngram]' does not fit"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 does not fit"),
        ({"max_num_batched_tokens": MAX_POSITIONS}, f"must be at least {MAX_POSITIONS + 1}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            open_llm(bart, **options)
    for change, words in (
        ({"encoder_attention_heads": 2}, "has 2 heads in its encoder and 4 in its decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
    ):
        folder = write_bart(tmp_path)
        edit_json(folder / "config.json", lambda config, own=change: config.update(own))
        with pytest.raises(ConfigError, match=words):
            open_llm(folder)
    with open_llm(bart) as llm:
        for prompt, words in (
            (of_ids(range(3, MAX_POSITIONS + 4)), f"has {MAX_POSITIONS + 1} tokens, more than"),
            ({"decoder_prompt": None}, "needs a prompt"),
            ({"encoder_prompt": {"prompt_token_ids": []}}, "empty"),
            ({**of_ids([5]), "prompt": "a"}, r"got \['prompt'\] too"),
            (of_ids([5], [999]), r"prompt_token_ids\[1\] = 999"),
            (of_ids([999]), r"prompt_token_ids\[0\] = 999"),
            ({**of_ids([5]), "decoder_prompt": "a"}, "no tokenizer"),
        ):
            with pytest.raises(InvalidPromptError, match=words):
                llm.generate(prompt, use_tqdm=False)
    with pytest.raises(CacheSizeError, match=r"encoder, 96, do not fit .* at most 80, or raise"):
        open_llm(bart, num_device_blocks_override=11)
    with pytest.raises(CacheSizeError, match="= 96 tokens; raise num_device_blocks_override to 12"):
        open_llm(bart, num_device_blocks_override=6)
