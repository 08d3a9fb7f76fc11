"""Text halves of models that also read pictures, beside the whole model of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, open_engine, serve
from support.messages import refused
from support.tiny_llama import edit_json
from support.whole_models import CASES, write_whole
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tpengine import EngineArgs
from tpengine.errors import ConfigError, ModelLoadError

PROMPTS = [[1, *(3 + (7 * i) % 300 for i in range(40))], [1, 9, 17]]


def expected(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )  # fmt: skip
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("model_type", CASES)
def test_ids_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    model = write_whole(tmp_path, model_type)
    wanted = [expected(model, prompt, 12) for prompt in PROMPTS]
    with open_engine(tmp_path, max_num_batched_tokens=16) as engine:
        assert engine.get_model_config().text_half_of == type(model).__name__
        outputs = serve(engine, PROMPTS, greedy(12))
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llava")
    write_whole(folder, "llava")
    return folder


def ids_of(folder: Path, **args: Any) -> list[list[int]]:
    with open_engine(folder, **args) as engine:
        return [list(output.outputs[0].token_ids) for output in serve(engine, PROMPTS, greedy(12))]


def test_a_head_of_its_own_counts_where_config_json_ties_nothing(tmp_path: Path) -> None:
    """The class of the whole model would tie it."""
    write_whole(tmp_path, "mistral3", tie_word_embeddings=False)
    wanted = ids_of(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.pop("tie_word_embeddings"))
    edit_json(
        tmp_path / "config.json", lambda config: config["text_config"].pop("tie_word_embeddings")
    )
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    assert ids_of(tmp_path) == wanted


def test_problems_are_those_of_the_text_half(llava: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llava, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    prefix, inner = "language_model.model.layers.1.", "mlp.up_proj.weight"
    tensors[f"{prefix}extra.weight"] = tensors.pop(prefix + inner)
    tensors["vision_tower.extra.weight"] = tensors.pop("multi_modal_projector.linear_1.weight")
    save_file(tensors, file)
    words = (
        "(2 tensors) | unexpected: model.layers.1.extra.weight | missing: model.layers.1." + inner
    )
    with refused(ModelLoadError, words), open_engine(folder):
        pass


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("paligemma", "PaliGemmaForConditionalGeneration | see each other in both directions"),
        ("mllama", "MllamaForConditionalGeneration | its text half is a mllama_text_model"),
        ("qwen3_vl_moe", "its text half is a qwen3_vl_moe_text, which no class"),
    ],
)
def test_a_text_half_that_cannot_run_is_named(model_type: str, words: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]]
    config.save_pretrained(tmp_path)
    with refused(ConfigError, words):
        EngineArgs(str(tmp_path)).create_engine_config("cpu")
