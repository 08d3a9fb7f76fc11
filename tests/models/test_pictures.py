"""Pictures in prompts, beside the whole model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import greedy, open_engine, run
from support.matrix import matrix
from support.programs import python
from support.whole_models import (
    IMAGE,
    MODELS,
    NUM_TOKENS,
    PICTURES,
    PROMPTS,
    Whole,
    picture,
    serve_prompts,
    write,
)
from transformers import AutoTokenizer, Idefics3Processor

from tpengine.engine_args import EngineArgs
from tpengine.models import vision_tower
from tpengine.models.vision_tower import VisionTower


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return write(request.param, tmp_path_factory.mktemp(request.param))


ARGS: dict[str, dict[str, Any]] = {
    "two-stages": {"pipeline_parallel_size": 2, "pp_layer_partition": "2,1"},
    "whole": {},
    "chunks": {"max_num_batched_tokens": 7},
    "one-by-one": {"max_num_batched_tokens": 16, "max_encoder_tokens": 1, "encoder_cache": 1.2e-5},
    "prefix-cache": {"enable_prefix_caching": True, "block_size": 8},
    "two-ranks": {"tp_size": 2},
}


# Beside different pictures in a prompt, and text alone: equal ones in a prompt, and odd sizes.
SIDE_BY_SIDE: list[tuple[list[int], list[Any]]] = [
    *PROMPTS,
    ([1, IMAGE, 5, IMAGE, 6, IMAGE, 7], [PICTURES[0], PICTURES[3], picture(4, 27, 85)]),
    ([IMAGE, 5, IMAGE, 8], [picture(6, 31, 9), picture(7, 101, 33)]),
]


@pytest.mark.parametrize(("whole", "args"), matrix(list(MODELS), list(ARGS)), indirect=["whole"])
def test_answers_are_those_of_transformers(whole: Whole, args: str) -> None:
    """Ids, and log probabilities of the five likeliest tokens."""
    params = [greedy(NUM_TOKENS, logprobs=5)] * len(SIDE_BY_SIDE)
    with open_engine(whole.folder, **ARGS[args]) as engine:
        for _ in range(2):
            outputs = serve_prompts(engine, SIDE_BY_SIDE, params)
            for output, (_, images) in zip(outputs, SIDE_BY_SIDE, strict=True):
                assert output.error is None
                ids, logprobs = whole.answer(output.prompt_token_ids, images)
                (completion,) = output.outputs
                assert list(completion.token_ids) == ids
                for entry, row in zip(completion.logprobs or [], logprobs, strict=True):
                    wanted = {token_id: float(row[token_id]) for token_id in entry}
                    own = {token_id: choice.logprob for token_id, choice in entry.items()}
                    assert own == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("whole", ["smolvlm"], indirect=True)
@pytest.mark.parametrize(
    ("height", "width"), [(28, 28), (90, 31), (20, 200), (27, 85), (84, 84), (1, 9)]
)
def test_the_tokens_of_a_picture_are_those_of_the_models_processor(
    whole: Whole, height: int, width: int
) -> None:
    """SmolVLM's own needs a package for videos; that of Idefics3 writes the same for pictures."""
    tokenizer = AutoTokenizer.from_pretrained(whole.folder)
    processor = Idefics3Processor(whole.processor, tokenizer, image_seq_len=1)
    image, text = picture(5, height, width), "ab <image>\nWhat is this?"
    wanted = processor(images=[image], text=text, input_data_format="channels_last")["input_ids"][0]
    with open_engine(whole.folder) as engine:
        engine.add_request("0", {"prompt": text, "multi_modal_data": {"image": image}}, greedy(1))
        (output,) = run(engine)
    assert output.prompt_token_ids == wanted


def test_what_stands_beside_a_picture_of_gemma_joins_the_text(tmp_path: Path) -> None:
    """Its processor replaces text, so that line ends may become one token."""
    whole = write("gemma3", tmp_path)
    text, picture_text = "ab{}\nab", "\n\n<start_of_image>{}<end_of_image>\n\n"
    expanded = text.format(picture_text.format("<image_soft_token>" * 4))
    with open_engine(whole.folder) as engine:
        inputs: Any = {"prompt": text.format("<image>"), "multi_modal_data": {"image": PICTURES[0]}}
        engine.add_request("0", inputs, greedy(1))
        (output,) = run(engine)
    assert output.prompt_token_ids == AutoTokenizer.from_pretrained(tmp_path)(expanded)["input_ids"]


def test_a_spare_imports_what_sees(tmp_path: Path) -> None:
    write("llava", tmp_path)
    args = EngineArgs(str(tmp_path))
    code = args.create_engine_config().model_code
    script = f"""import sys
from tpengine.worker.spare_imports import import_model_code
import_model_code(*{code})
print('transformers.models.llava.modeling_llava' in sys.modules)"""
    assert python("-c", script).stdout == "True\n"
    args.limit_mm_per_prompt = {"image": 0}
    assert args.create_engine_config().model_code == ("tpengine", None)


@pytest.mark.parametrize("whole", ["qwen2_5_vl"], indirect=True)
def test_the_tower_rests_within_a_layer_of_a_large_picture(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineArgs(str(whole.folder)).create_engine_config().model
    tower, rests, features = VisionTower(config, torch.float32, torch.device("cpu")), [0, 0], []
    pixels = picture(3, 90, 84).tobytes()
    for at, most_queries in enumerate((1000, 3)):
        monkeypatch.setattr(vision_tower, "_MOST_QUERIES", most_queries)

        def count(at: int = at) -> None:
            rests[at] += 1

        tower.before_layer = count
        with torch.inference_mode():
            features.append(tower.features(pixels, 90, 84))
    assert rests[1] > rests[0] + 10
    torch.testing.assert_close(*features, atol=1e-6, rtol=1e-5)
