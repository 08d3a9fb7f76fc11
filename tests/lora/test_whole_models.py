"""Adapters of models that also read pictures, made by PEFT over the class of the whole model."""

from __future__ import annotations

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.adapters import adapt
from support.engines import open_engine
from support.messages import refused
from support.whole_models import PROMPTS, serve_prompts, write, write_whole

from tpengine import LoRARequest
from tpengine.errors import InvalidAdapterError

WEIGHTS = "adapter_model.safetensors"
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "target_modules": r".*language_model.*(q_proj|v_proj|up_proj)",
        "rank_pattern": {r"language_model\.(model\.)?layers\.1\..*": 3},
    },
    "qwen2_5_vl": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "gemma3": {"exclude_modules": r".*(vision_tower|projector).*"},
    "smolvlm": {
        "target_modules": ["k_proj", "gate_proj"],
        "exclude_modules": r".*\.vision_model\..*",
        "alpha_pattern": {r"text_model\..*gate_proj": 40},
    },
}


def with_old_names(folder: Path) -> Path:
    """An adapter as PEFT wrote it with transformers before 4.52."""
    old = shutil.copytree(folder, folder.with_name("old"))
    tensors = load_file(old / WEIGHTS)
    pattern = re.compile(r"^(base_model\.model)\.model\.(language|text)_model\.")
    renamed = {pattern.sub(r"\1.\2_model.model.", name): x for name, x in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    save_file(renamed, old / WEIGHTS)
    return old


@pytest.mark.parametrize(
    ("name", "tp_size"), [("llava", 2), ("qwen2_5_vl", 2), ("gemma3", 1), ("smolvlm", 1)]
)
def test_ids_are_those_of_peft(name: str, tp_size: int, tmp_path: Path) -> None:
    """With pictures and with text alone, side by side with rows of the base."""
    whole, folder = write(name, tmp_path), tmp_path / "new"
    adapted = adapt(whole.model, 1, **CONFIGS[name])
    adapted.save_pretrained(folder)
    paths = [folder, with_old_names(folder)]
    requests = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1))]
    jobs = [(prompt, request) for prompt in PROMPTS for request in requests]
    prompts, adapters = zip(*jobs, strict=True)
    with open_engine(tmp_path, tp_size, enable_lora=True, max_loras=2) as engine:
        outputs = serve_prompts(engine, prompts, adapters=adapters)
    ids = []
    for output, ((_, images), request) in zip(outputs, jobs, strict=True):
        with adapted.disable_adapter() if request is None else nullcontext():
            ids.append(whole.answer(output.prompt_token_ids, images)[0])
    assert [list(output.outputs[0].token_ids) for output in outputs] == ids
    assert all(base != own for base, own in zip(ids[::3], ids[1::3], strict=True))


@pytest.mark.parametrize(
    ("target_modules", "words"),
    [
        (r".*vision_tower.*q_proj", "model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A"),
        (["q_proj"], "model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A"),
        (r".*(linear_1|language_model.*q_proj)", "model.multi_modal_projector.linear_1.lora_A"),
    ],
)
def test_layers_of_the_other_half(target_modules: Any, words: str, tmp_path: Path) -> None:
    """Those of this tower have the sizes and, but for a prefix, the names of the text half's."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3}
    model = write_whole(tmp_path, "llava", sizes)
    adapt(model, 1, target_modules=target_modules).save_pretrained(tmp_path / "adapter")
    request = LoRARequest("mine", 1, str(tmp_path / "adapter"))
    with open_engine(tmp_path, enable_lora=True) as engine:
        text = f"{words}.weight is of no linear layer | only the layers of the text half"
        with refused(InvalidAdapterError, text):
            engine.add_lora(request)
