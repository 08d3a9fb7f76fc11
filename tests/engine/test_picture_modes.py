"""Prompts with pictures in every mode of the engine: the outputs are bit for bit those of an engine
with room for all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from executor.ray_engines import at_step, kill_rank
from support.engines import bits, open_engine
from support.messages import refused
from support.patches import on_call
from support.whole_models import IMAGE, PICTURES, PROMPTS, WORDS, picture, serve_prompts, write

from tpengine import LLMEngine, RequestOutput, SamplingParams
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, InvalidPromptError
from tpengine.models.vision_tower import VisionTower
from tpengine.sampling_params import StructuredOutputsParams
from tpengine.worker import tower_turns
from tpengine.worker.tower_turns import TowerTurns

_LENGTH = {"ignore_eos": True, "max_tokens": 30}
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2, **_LENGTH),
    SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, **_LENGTH),
    SamplingParams(n=2, temperature=0.9, seed=2, **_LENGTH),
    SamplingParams(n=2, best_of=2, use_beam_search=True, temperature=0.0, **_LENGTH),
    SamplingParams(temperature=0.0, prompt_logprobs=1, **_LENGTH),
    SamplingParams(
        temperature=1.0, seed=4, structured_outputs=StructuredOutputsParams(regex="[ab]{30}")
    ),
]
REQUESTS = [*PROMPTS, ([1, IMAGE, *WORDS, IMAGE], PICTURES[1:3]), ([97, IMAGE], PICTURES[2:3])]
SIZES = {"max_model_len": 128, "block_size": 8}
SCARCE = {"num_device_blocks_override": 16}
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 9},
    "whole-prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "swap": {"preemption_mode": "swap", **SCARCE},
    "recompute": {"preemption_mode": "recompute", **SCARCE},
    "room-for-one": {"encoder_cache": 1.3e-5, "max_num_batched_tokens": 16},
    "prefix-cache": {"enable_prefix_caching": True},
    "drafts": {"speculative_model": "[ngram]", "num_speculative_tokens": 3},
    "cached-drafts": {"speculative_model": "[ngram]", "enable_prefix_caching": True},
    "op-by-op": {"enforce_eager": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-cache": {"kv_cache_dtype": "int8"},
}


OTHERS = ["gemma3", "llava", "smolvlm", "qwen2_5_vl"]


def summaries(outputs: list[RequestOutput]) -> list[Any]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.prompt_logprobs, bits(output)) for output in outputs]


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Any]]:
    """By form."""
    wanted = {}
    for form, args in FORMS.items():
        with open_engine(folder, **SIZES, **args) as engine:
            wanted[form] = summaries(serve_prompts(engine, REQUESTS, PARAMS))
    assert wanted["float32"] != wanted["int4"]
    return wanted


CELLS = [("float32", mode) for mode in MODES] + [(form, "chunks") for form in FORMS]


@pytest.mark.parametrize(("form", "mode"), dict.fromkeys(CELLS))
def test_modes_change_nothing(
    folder: Path, expected: dict[str, list[Any]], form: str, mode: str
) -> None:
    args = {**SIZES, "swap_space": 0.01, **FORMS[form], **MODES[mode]}
    with open_engine(folder, **args) as engine:
        for _ in range(2):
            assert summaries(serve_prompts(engine, REQUESTS, PARAMS)) == expected[form]
        assert (engine.counters.num_preemptions > 0) == (mode in ("swap", "recompute"))


def test_a_tower_that_rests_before_each_layer_changes_nothing(
    folder: Path, expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower_turns, "_ALONE_S", 1e-9)
    made = on_call(monkeypatch, TowerTurns, "__init__")
    turns = on_call(monkeypatch, TowerTurns, "begin_turn")
    with open_engine(folder, **SIZES, encoder_share=1e-6) as engine:
        assert summaries(serve_prompts(engine, REQUESTS, PARAMS)) == expected["float32"]
    assert [share for _, _, share, *_ in made] == [1e-6]
    assert len(turns) > 100


def test_lost_ranks(folder: Path) -> None:
    """Features are computed again. They are those of transformers' code, whose sums depend on the
    number of threads, so that the outputs are compared with those of the same ranks."""
    args = EngineArgs(
        str(folder), dtype="float32", device="cpu", executor="processes", **SIZES,
        pipeline_parallel_size=2, pp_layer_partition="2,1", max_num_batched_tokens=8,
    )  # fmt: skip
    with LLMEngine.from_engine_args(args) as engine:
        expected = summaries(serve_prompts(engine, REQUESTS, PARAMS))
        for rank in range(2):
            kill = at_step(4, partial(kill_rank, engine, rank))
            outputs = serve_prompts(engine, REQUESTS, PARAMS, kill)
            assert summaries(outputs) == expected
            assert len(engine.recoveries) == rank + 1


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llava", tmp_path_factory.mktemp("llava-alone")).folder


@pytest.fixture
def engine(llava: Path) -> Iterator[LLMEngine]:
    with open_engine(llava, limit_mm_per_prompt={"image": 2}, enable_prefix_caching=True) as engine:
        yield engine


def test_a_picture_is_computed_once(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another question about it, and the same one again, need no tower; another picture does."""
    sizes: list[int] = []
    on_call(monkeypatch, VisionTower, "features", lambda _, __, height, ___: sizes.append(height))
    first = ([1, IMAGE, 5], PICTURES[:1])
    serve_prompts(engine, [first])
    assert sizes == [40]
    serve_prompts(engine, [first, ([7, 8, IMAGE], PICTURES[3:])])
    assert sizes == [40]
    serve_prompts(engine, [([1, IMAGE, 5], [picture(9, 41, 60)])])
    assert sizes == [40, 41]


@pytest.mark.parametrize(
    ("token_ids", "images", "words"),
    [
        (
            [1, IMAGE],
            PICTURES[:2],
            "1 placeholder (token 261, '<image>') | 2 pictures | one for each",
        ),
        ([1, 5], PICTURES[:1], "0 placeholders | 1 picture"),
        ([1, IMAGE, IMAGE, IMAGE], PICTURES[:3], "3 pictures | at most 2 | limit_mm_per_prompt"),
        ([1, IMAGE], ["a.png"], "a picture's URL begins with data:image/"),
    ],
)
def test_wrong_pictures_are_refused(
    engine: LLMEngine, token_ids: list[int], images: list[Any], words: str
) -> None:
    with refused(InvalidPromptError, words):
        serve_prompts(engine, [(token_ids, images)])
    assert serve_prompts(engine, PROMPTS[:1])[0].error is None


def test_a_picture_without_features_ends_its_request_alone(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any, pixels: bytes, height: int, width: int) -> None:
        if height == 28:
            raise ValueError("too odd")

    on_call(monkeypatch, VisionTower, "features", fail)
    prompts = [([1, IMAGE, 5], [image]) for image in PICTURES[:3]]
    outputs = serve_prompts(engine, prompts)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "cannot take a picture of 28 x 28 pixels" in str(outputs[1].error)
    monkeypatch.undo()
    assert serve_prompts(engine, prompts)[1].error is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"allowed_media_hosts": "a.example, http://b/"}, "'http://b/' names no host"),
        ({"encoder_cache": 1e-9}, "encoder_cache has room for 0 tokens of pictures, and one has"),
        ({"encoder_cache": 1e6}, "encoder_cache takes 1000000.00 GiB, and this machine has"),
    ],
)
def test_wrong_options(llava: Path, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), open_engine(llava, **args, dtype="float32"):
        pass
