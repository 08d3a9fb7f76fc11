"""Small random models that embed, score or classify, and what transformers gives for a prompt."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tpengine import LLMEngine
from tpengine.engine.requests import GenerateRequest
from tpengine.inputs import PoolingParams

POOLINGS = {
    "last": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
}


def write_classifier(folder: Path, source: Path, num_labels: int) -> None:
    """Writes the layers of the model in `source` with a random head for so many classes."""
    config = transformers.AutoConfig.from_pretrained(source, num_labels=num_labels)
    config.pad_token_id = 0  # transformers finds the last token by it
    config.architectures = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(num_labels)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            source, config=config, dtype=torch.float32
        )
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.3)
    model.eval().save_pretrained(folder)


def write_modules(
    folder: Path, pooling: str, *, dense: tuple[int, int] | None = None, **settings: Any
) -> None:
    """Writes the files of sentence-transformers around a model.

    Args:
        dense: sizes of a layer behind the pooling, with tanh; its weights are random.
        settings: of config_sentence_transformers.json.
    """
    names = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = []
    for place, name in enumerate(names):
        path = "" if name == "Transformer" else f"{place}_{name}"
        (folder / path).mkdir(exist_ok=True)
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": place, "name": str(place), "path": path, "type": kind})
    mode = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[pooling]
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    fields: dict[str, Any] = {"word_embedding_dimension": size, f"pooling_mode_{mode}": True}
    _write(folder / "1_Pooling" / "config.json", fields)
    if dense is not None:
        fields = {"in_features": dense[0], "out_features": dense[1], "bias": True}
        fields |= {"activation_function": "torch.nn.modules.activation.Tanh"}
        _write(folder / "2_Dense" / "config.json", fields)
        torch.manual_seed(1)
        layer = torch.nn.Linear(*dense)
        tensors = {f"linear.{name}": value for name, value in layer.state_dict().items()}
        torch.save(tensors, folder / "2_Dense" / "pytorch_model.bin")
    _write(folder / "modules.json", modules)
    _write(folder / "config_sentence_transformers.json", settings)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def hidden_states(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Of each token after the last layer, `[num_tokens, hidden_size]`."""
    with torch.inference_mode():
        return model(torch.tensor([list(prompt)])).last_hidden_state[0]


def embed_ids(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], at_first: Callable[[], None] | None = None
) -> torch.Tensor:
    """The vectors of prompts that are all there at once, `[num_prompts, hidden_size]`.

    Args:
        at_first: called when the first one is there.
    """
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(prompt_token_ids=prompt, pooling_params=PoolingParams())
        engine.add_checked(str(number), engine.check_request(request))
    vectors: dict[str, array[float]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.pooled is not None, output.error
            vectors[output.request_id] = output.pooled
        if at_first is not None and vectors:
            at_first()
            at_first = None
    assert engine.num_free_blocks == engine.num_total_blocks
    return torch.tensor([list(vectors[str(number)]) for number in range(len(prompts))])


def normalized(vector: torch.Tensor) -> torch.Tensor:
    """A vector of length 1 in the same direction."""
    return vector / vector.norm()
