"""What a model that makes no tokens gives, as a request wants it."""

from __future__ import annotations

from array import array

import numpy as np

from tpengine.config import ModelConfig, PoolingConfig
from tpengine.errors import (
    InvalidPromptError,
    InvalidSamplingParamsError,
    RequestFailedError,
)
from tpengine.inputs import PoolingParams


def check_pooling_params(params: PoolingParams, model: ModelConfig) -> PoolingConfig:
    """Checks what a request wants of a model; returns what the model does.

    Raises:
        InvalidSamplingParamsError: the model does not do it.
    """
    pooling = model.pooling
    if pooling is None:
        text = "the model generates; to embed with it, start the engine with task='embed'"
        raise InvalidSamplingParamsError(text)
    if params.dimensions is not None:
        if pooling.task != "embed":
            text = f"= {params.dimensions}: the model does {pooling.task!r}, and gives no embedding"
            raise InvalidSamplingParamsError.of_field("dimensions", text)
        if params.dimensions > model.num_outputs:
            text = (
                f"= {params.dimensions} is more than the model's {model.num_outputs}; ask for fewer"
            )
            raise InvalidSamplingParamsError.of_field("dimensions", text)
    if params.prompt_name is not None and params.prompt_name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        text = f"= {params.prompt_name!r:.80} is no prompt of the model; it has {known}"
        raise InvalidSamplingParamsError.of_field("prompt_name", text)
    return pooling


def check_generates(pooling: PoolingConfig | None) -> None:
    """Checks that a request without `PoolingParams` fits a model.

    Raises:
        InvalidPromptError: the model makes no tokens.
    """
    if pooling is not None:
        task = f"the model does {pooling.task!r} and makes no tokens"
        hint = "use LLM.encode, `tpengine client embed` or the endpoints of docs/embeddings.md"
        raise InvalidPromptError(f"{task}; {hint}")


def prompt_before(params: PoolingParams, pooling: PoolingConfig) -> str:
    """The model's text that stands before a user's text."""
    name = pooling.default_prompt if params.prompt_name is None else params.prompt_name
    return "" if name is None else pooling.prompts.get(name, "")


def finish_outputs(values: bytes, params: PoolingParams, pooling: PoolingConfig) -> array[float]:
    """Cuts and normalises an embedding; makes probabilities of scores and classes.

    Args:
        values: see `StepOutput.pooled`.

    Raises:
        RequestFailedError: a number is not finite.
    """
    outputs = np.frombuffer(values, np.float32).astype(np.float64)
    if not np.isfinite(outputs).all():
        text = "the model's numbers for this prompt are not finite (NaN or infinity)"
        raise RequestFailedError(f"{text}; check its weights, or use dtype='float32'")
    if pooling.task == "embed":
        outputs = outputs[: params.dimensions]
        is_normal = pooling.normalize if params.normalize is None else params.normalize
        length = np.linalg.norm(outputs) if is_normal else 0.0
        outputs = outputs / length if length else outputs
    elif params.activation and pooling.activation == "sigmoid":
        outputs = 1.0 / (1.0 + np.exp(-np.maximum(outputs, -700.0)))
    elif params.activation and pooling.activation == "softmax":
        powers = np.exp(outputs - outputs.max())
        outputs = powers / powers.sum()
    return array("f", outputs.astype(np.float32).tobytes())
