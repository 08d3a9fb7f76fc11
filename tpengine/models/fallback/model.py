"""Decoders without a file of their own: transformers' code over our paged KV cache.

The model is transformers' class. Four things of it are ours: attention (through transformers'
attention interface), linear layers and the token embedding (sharded by the class's own
`base_model_tp_plan`), the output head, and the way in which weights are read.

A batch is one row of tokens, so between attention calls no token may see another. Before weights
are read, a probe runs the class on a few tokens: it checks that, and learns what attention needs.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from tpengine.config import ModelConfig, own_code
from tpengine.errors import ConfigError
from tpengine.layers.attention import AttentionMetadata, KVCache, keep_rows
from tpengine.layers.weights import Weights
from tpengine.models.fallback import layers
from tpengine.models.fallback.checkpoint import (
    Outline,
    allocate_parameters,
    convert_tensors,
)
from tpengine.models.fallback.fallback_attention import (
    INTERFACE,
    Probe,
    Shape,
    Step,
    UnfitError,
    make_layers,
    running,
)

_EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache")
_NO_INTERFACE = "its attention does not go through transformers' attention interface"
_PROBE_IDS = (3, 1, 4, 1, 5)
_PROBE_START = 3
"""Position of the probe's first token: a class that counts positions itself begins at 0."""


class _Given(nn.Module):
    """Stands in place of the class's decoder and returns given hidden states; the class's own code
    then computes logits from them.

    Attributes:
        output: the decoder's answer.
    """

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self._output_class = output_class
        self.output: Any = None

    def give(self, hidden: torch.Tensor) -> None:
        self.output = self._output_class(last_hidden_state=hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class TransformersForCausalLM:
    """A decoder of transformers on one rank."""

    ignored_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)
    recordable = False
    """Its code calls ops of torch, and may read numbers out of tensors."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        try:
            self._build(config, weights)
        except UnfitError as error:
            raise ConfigError(
                f"{config.architecture} of {config.model} does not run on transformers' code: "
                f"{error}; docs/models.md lists what runs"
            ) from error.__cause__

    def _build(self, config: ModelConfig, weights: Weights) -> None:
        self._root = root = _empty_model(config, weights)
        self.base_prefix = f"{root.base_model_prefix}."
        plan = layers.TensorParallelPlan(root, config, weights.parallel)
        outline = Outline(root)
        replaced = _replace_layers(root, plan)
        allocate_parameters(root, weights)
        shapes = self._probe(weights.device)
        self._layers = make_layers(shapes)
        for name, layer in replaced.items():
            layer.allocate(weights, name)
        weights.convert = partial(convert_tensors, root, outline, weights)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `registry.CausalLM.forward`; it has no stages."""
        assert hidden is None, "engine_args.py refuses stages of transformers' code"
        step = Step(self._layers, kv_caches, metadata)
        hidden = self._hidden(step, token_ids.long(), metadata.positions.long())
        return keep_rows(hidden, metadata.wanted_rows)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        self._given.give(hidden.unsqueeze(0))
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._root(input_ids=ids).logits[0]
        return logits

    def _hidden(
        self, current: Probe | Step, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        with running(current):
            output = self._base(**_inputs(self._base, token_ids, positions))
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _probe(self, device: torch.device) -> list[Shape]:
        """Runs the class on a few tokens together, then on the last one alone; finds its decoder,
        and returns the shapes of its attention calls.

        Raises:
            UnfitError: its code fails, or a token's result depends on other tokens.
        """
        ids = torch.tensor(_PROBE_IDS, device=device)
        from_zero = torch.arange(len(ids), device=device)
        positions = from_zero + _PROBE_START
        together, alone = Probe(), Probe()
        with _explained(), running(alone):
            unplaced = self._root(input_ids=ids.unsqueeze(0)).logits
            placed = self._root(**_inputs(self._root, ids, from_zero)).logits
            expected = self._find_base(together, ids, positions)
            hidden = self._hidden(alone, ids[-1:], positions[-1:])
            actual = self.compute_logits(hidden)[-1:]
        if not together.shapes:
            raise UnfitError(_NO_INTERFACE)
        if not torch.allclose(unplaced, placed):
            raise UnfitError("its own positions do not begin at 0")
        if not torch.allclose(actual.float(), expected.float(), rtol=1e-2, atol=1e-3):
            raise UnfitError(
                "a token's result depends on other tokens outside attention (a state, a "
                "convolution, attention of its own), or on positions that it counts itself"
            )
        return together.shapes

    def _find_base(self, probe: Probe, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Runs the whole class, and puts `_Given` where its decoder is: the outermost module that
        returned hidden states. Returns the last token's logits `[1, vocab_size]`."""
        root, decoders = self._root, {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if getattr(output, "last_hidden_state", None) is not None:
                    decoders[name] = type(output)

            return hook

        hooks = [m.register_forward_hook(note(name)) for name, m in root.named_modules() if name]
        try:
            with running(probe):
                logits: torch.Tensor = root(**_inputs(root, ids, positions)).logits
        finally:
            for hook in hooks:
                hook.remove()
        if not decoders:
            raise UnfitError("it has no decoder that returns last_hidden_state")
        path = min(decoders, key=lambda name: name.count("."))
        self._base = root.get_submodule(path)
        self._given = _Given(decoders[path])
        root.set_submodule(path, self._given)
        return logits[0, -1:]


def _inputs(module: nn.Module, token_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """The arguments of a call, of those that the module's `forward` takes."""
    ids, places = token_ids.long().unsqueeze(0), positions.long().unsqueeze(0)
    wanted = {"input_ids": ids, "position_ids": places, "use_cache": False}
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return wanted
    return {name: value for name, value in wanted.items() if name in parameters}


def _empty_model(config: ModelConfig, weights: Weights) -> Any:
    """Builds transformers' model with its parameters on the meta device; buffers have values.

    Raises:
        ConfigError: its rotary positions do not suit `max_model_len`.
        UnfitError: its code fails.
    """
    with _explained(), _parameters_on_meta():
        config_class, model_class = _classes(config)
        fields = dict(config.hf_config)
        fields.pop("model_type")
        hf_config = config_class.from_dict(fields)
        _check_rope(hf_config, config)
        for name in _EXTRA_OUTPUTS:
            if getattr(hf_config, name, None):
                setattr(hf_config, name, False)
        model = model_class._from_config(
            hf_config, attn_implementation=INTERFACE, dtype=weights.dtype
        )
    return model.eval()


def _classes(config: ModelConfig) -> tuple[Any, Any]:
    """Classes of configuration and model: of transformers, or of the model's own folder."""
    code, model_type = own_code(config.hf_config), config.hf_config["model_type"]
    if code is None:
        return CONFIG_MAPPING[model_type], getattr(transformers, config.architecture)
    assert config.trust_remote_code, "`choose_model_impl` refuses it"
    model_class = get_class_from_dynamic_module(code, config.model)
    if (of_config := config.hf_config["auto_map"].get("AutoConfig")) is None:
        return CONFIG_MAPPING[model_type], model_class
    return get_class_from_dynamic_module(of_config, config.model), model_class


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns an error of transformers' code into a refusal.

    Raises:
        UnfitError: the code in the block raised an error.
    """
    try:
        yield
    except (UnfitError, ConfigError):
        raise
    except KeyError as error:
        if error.args != (INTERFACE,):
            raise UnfitError(f"its code fails (KeyError: {error})") from error
        raise UnfitError(_NO_INTERFACE) from None  # it chooses from a table of its own
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UnfitError(f"its code fails ({type(error).__name__}: {first_line})") from error


def _check_rope(hf_config: Any, config: ModelConfig) -> None:
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None)
    rope = rope or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in ("dynamic", "longrope"):
        return
    limit = rope.get("original_max_position_embeddings") or hf_config.max_position_embeddings
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len = {config.max_model_len}: the rotary positions of {config.model} "
            f"({kind}) change with the longest sequence of a batch beyond {limit} tokens on "
            f"transformers' code; set max_model_len to at most {limit}"
        )


_META_LOCK = threading.Lock()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the block, parameters that this thread makes take no memory; buffers do."""

    def register_empty(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if threading.get_ident() == thread and value is not None and not value.is_meta:
            value = nn.Parameter(value.detach().to("meta"), requires_grad=False)
        register(module, name, value)

    thread = threading.get_ident()
    with _META_LOCK:
        register = nn.Module.register_parameter  # in turn, else it may be another thread's
        nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _replace_layers(root: Any, plan: layers.TensorParallelPlan) -> dict[str, layers.LayerInPlace]:
    """Puts our layers where the model has its linear layers, embedding and head; returns them by
    name. They have no weights yet."""
    embedding, head = root.get_input_embeddings(), root.get_output_embeddings()
    replaced: dict[str, layers.LayerInPlace] = {}
    names = {id(module): name for name, module in root.named_modules()}
    tied = None
    if type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale"):
        tied = layers.EmbeddingInPlace(embedding)
        replaced[names[id(embedding)]] = tied
    if isinstance(head, nn.Linear):
        is_tied = head.weight is embedding.weight
        if tied is not None or not is_tied:
            replaced[names[id(head)]] = layers.HeadInPlace(head, tied if is_tied else None)
    for name, module in root.named_modules():
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            replaced[name] = layers.LinearInPlace(module, plan.style(name), plan.parallel)
    plan.divide_heads(root, replaced)
    for name, layer in replaced.items():
        root.set_submodule(name, layer)
    return replaced
