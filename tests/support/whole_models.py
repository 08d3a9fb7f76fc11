"""Small random models that see: both halves, image processors, tokenizers and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from support.byte_llama import write_tokenizer
from support.engines import greedy, serve
from support.tiny_llama import random_model
from tpengine import LLMEngine, LoRARequest, SamplingParams
from tpengine.outputs import RequestOutput

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 2, "out_hidden_size": 64,
}  # fmt: skip
WINDOW = {"sliding_window": 24, "query_pre_attn_scalar": 16}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "aya_vision": ("cohere2", {}),  # by transformers' code
    "gemma3": ("gemma3_text", WINDOW),
    "idefics2": ("mistral", {}),
    "idefics3": ("llama", {}),
    "internvl": ("qwen2", {}),
    "llava": ("llama", {}),
    "llava_next": ("mistral", {}),
    "llava_onevision": ("qwen2", {}),
    "mistral3": ("mistral", {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", AXES),
    "qwen2_vl": ("qwen2_vl_text", AXES),
    "qwen3_vl": ("qwen3_vl_text", AXES),
    "smolvlm": ("llama", {}),
}
"""By `model_type`: that of the text half, and fields of it."""


def write_whole(
    folder: Path,
    model_type: str,
    sight: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Writes a small random model with both halves; returns it.

    Args:
        sight: further fields of what sees.
        text: of the text half.
    """
    text_type, more = CASES.get(model_type, ("gemma", {}))
    halves = {
        "text_config": {"model_type": text_type, **TEXT, **more, **(text or {})},
        "vision_config": {**SIGHT, **(sight or {})},
    }
    config = AutoConfig.for_model(model_type, **halves, **fields)
    make = partial(AutoModelForImageTextToText.from_config, config, dtype=torch.float32)
    model = random_model(make)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None  # as `ignore_eos`
    return model


IMAGE = 261
"""Id of the placeholder."""
ADDED = ["<image>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"]
ADDED += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
ADDED += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
NUM_TOKENS = 12


def picture(seed: int, height: int, width: int) -> Any:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


PICTURES = [picture(0, 40, 60), picture(1, 28, 28), picture(2, 90, 84), picture(0, 40, 60)]


_TYPE_IDS = dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], "mm_token_type_ids")
_TYPE_IDS |= {"gemma3": "token_type_ids"}


@dataclass
class Whole:
    """A model in a folder, with its image processor."""

    folder: Path
    model: Any
    processor: Any

    def answer(
        self, token_ids: Sequence[int], images: Sequence[Any]
    ) -> tuple[list[int], torch.Tensor]:
        """What transformers generates after a prompt whose placeholders are replaced: ids, and log
        probabilities `[NUM_TOKENS, vocab_size]`."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if images:
            kind = {"return_tensors": "pt", "input_data_format": "channels_last"}
            inputs |= self.processor(images=list(images), **kind)
            inputs.pop("num_crops", None)
            if (name := _TYPE_IDS.get(self.model.config.model_type)) is not None:
                inputs[name] = (inputs["input_ids"] == self.model.config.image_token_id).int()
        modes = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        output = self.model.generate(**inputs, max_new_tokens=NUM_TOKENS, **modes)
        ids = list(output.sequences[0, len(token_ids) :].tolist())
        return ids, torch.cat(output.logits).log_softmax(dim=-1)


def write_llava(folder: Path, image_id: int = IMAGE) -> Whole:
    model = write_whole(folder, "llava", image_token_index=image_id)
    size = {"height": 28, "width": 28}
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    return Whole(folder, model, processor)


def write_smolvlm(folder: Path) -> Whole:
    """Pictures are cut into tiles of 28 pixels; a feature stands for four patches."""
    model = write_whole(folder, "smolvlm", image_token_id=IMAGE, scale_factor=2)
    edges = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
    processor = transformers.SmolVLMImageProcessorPil(**edges)
    return Whole(folder, model, processor)


def write_qwen(model_type: str, folder: Path) -> Whole:
    """A token stands for 28 x 28 pixels."""
    sight = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64},
        "qwen2_5_vl": {"fullatt_block_indexes": [1], "window_size": 56},
        "qwen3_vl": {"deepstack_visual_indexes": [0, 1]},
    }[model_type]
    model = write_whole(folder, model_type, sight, image_token_id=IMAGE)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
    return Whole(folder, model, transformers.Qwen2VLImageProcessorPil(size=size, patch_size=14))


def write_gemma3(folder: Path) -> Whole:
    """Tokens of a picture see each other."""
    ids = {"boi_token_index": IMAGE, "image_token_index": IMAGE + 1, "eoi_token_index": IMAGE + 3}
    model = write_whole(folder, "gemma3", {"image_size": 56}, mm_tokens_per_image=4, **ids)
    size = {"height": 56, "width": 56}
    return Whole(folder, model, transformers.Gemma3ImageProcessorPil(size=size))


MODELS = {
    "gemma3": write_gemma3,
    "llava": write_llava,
    "qwen2_vl": partial(write_qwen, "qwen2_vl"),
    "qwen2_5_vl": partial(write_qwen, "qwen2_5_vl"),
    "qwen3_vl": partial(write_qwen, "qwen3_vl"),
    "smolvlm": write_smolvlm,
}


def write(name: str, folder: Path) -> Whole:
    """Writes one of `MODELS`, with its image processor and a tokenizer of bytes."""
    made = MODELS[name](folder)
    made.processor.save_pretrained(folder)
    write_tokenizer(folder, *(AddedToken(token, special=True) for token in ADDED))
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<image>") == IMAGE
    return made


def serve_prompts(
    engine: LLMEngine,
    prompts: Sequence[tuple[list[int], list[Any]]],
    params: Sequence[SamplingParams] = (),
    after_step: Callable[[], object] = lambda: None,
    adapters: Sequence[LoRARequest | None] = (),
) -> list[RequestOutput]:
    """The last output of each prompt, all side by side; greedy ones unless `params` say."""
    forms = [
        {"prompt_token_ids": ids} | ({"multi_modal_data": {"image": images}} if images else {})
        for ids, images in prompts
    ]
    return serve(engine, forms, params or greedy(NUM_TOKENS), adapters, after_step)


WORDS = [1, *(3 + (7 * i) % 300 for i in range(20))]
PROMPTS = [
    ([1, 5, IMAGE, 9, 10], PICTURES[:1]),
    ([1, IMAGE, 8, IMAGE, 4, IMAGE, 7], PICTURES[:3]),
    (WORDS, []),
    ([*WORDS, IMAGE, 6], PICTURES[3:]),
]
