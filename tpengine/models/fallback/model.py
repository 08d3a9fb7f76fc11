"""Decoders without a file of their own: transformers' code over our paged KV cache.

The model is transformers' class. Four things of it are ours: attention (through transformers'
attention interface), linear layers and the token embedding (sharded by the class's own
`base_model_tp_plan`), the output head, and the way in which weights are read.

A batch is one row of tokens, `[1, num_tokens]`, so between attention calls no token may see another.
Before weights are read, a probe runs the class on a few tokens and checks that. It also learns each
attention call's shape, scale and window; call i of a pass has KV cache i.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from tpengine.config import ModelConfig
from tpengine.errors import ConfigError
from tpengine.layers.attention import Attention, AttentionMetadata, KVCache, keep_rows
from tpengine.layers.weights import Weights
from tpengine.models.fallback.checkpoint import CheckpointConversion, allocate_parameters
from tpengine.models.fallback.layers import (
    EmbeddingInPlace,
    HeadInPlace,
    LayerInPlace,
    LinearInPlace,
    TensorParallelPlan,
)

_INTERFACE = "tpengine"
_HEAD_DIM_STEP = 16
_MAX_HEAD_DIM = 256
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PASSED_ON = {
    "cache_position",
    "deterministic",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",
    "use_cache",
}
"""Arguments of the attention interface that need nothing of it: the mask says what is visible."""
_PROBE_IDS = (3, 1, 4, 1, 5)
_PROBE_START = 3
"""Position of the probe's first token: a class that counts positions itself begins at 0."""
_FAR = 1 << 20


class _UnfitError(Exception):
    """The class needs something that paged attention does not do; the message names it."""


class _Pass(Protocol):
    """What transformers' code gets from us while it runs."""

    def mask(self, visible: Callable[..., Any], device: torch.device) -> torch.Tensor:
        """What the code passes on to `attend` as its mask."""

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """q `[1, num_heads, num_tokens, head_dim]`, k and v alike, to
        `[1, num_tokens, num_heads, value_dim]`."""


_PASS: ContextVar[_Pass] = ContextVar("_PASS")


@contextlib.contextmanager
def _running(one: _Pass) -> Iterator[None]:
    token = _PASS.set(one)
    try:
        yield
    finally:
        _PASS.reset(token)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _PASS.get().attend(module, query, key, value, attention_mask, options), None


def _make_mask(*, mask_function: Callable[..., Any], **options: Any) -> torch.Tensor:
    return _PASS.get().mask(mask_function, options.get("device") or torch.device("cpu"))


ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_INTERFACE, _make_mask)


@dataclass(frozen=True, slots=True)
class _Shape:
    """One attention call of this rank; `value_dim` is the head size of V."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None


class _Probe:
    """Learns what attention the class needs. Its own attention mixes no tokens.

    Attributes:
        shapes: of the attention calls so far, in their order.
    """

    def __init__(self) -> None:
        self.shapes: list[_Shape] = []

    def mask(self, visible: Callable[..., Any], device: torch.device) -> torch.Tensor:
        mask = torch.zeros(1, 1, 1, 1, device=device)
        mask.visible_window = _window_of(visible)  # type: ignore[attr-defined]
        return mask

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        self.shapes.append(_shape_of(module, q, k, v, mask, options))
        groups = q.shape[1] // k.shape[1]
        # The means depend on the rotation, so that a wrong position shows.
        seen = v + k.mean(-1, keepdim=True)
        mixed = seen.repeat_interleave(groups, dim=1) + q.mean(-1, keepdim=True)
        return mixed.transpose(1, 2).contiguous()


def _window_of(visible: Callable[..., Any]) -> int | None:
    """Returns the window of a mask, in tokens; None: a token sees all tokens before it.

    Args:
        visible: mask function of transformers: batch, head, query and key index to a bool.

    Raises:
        _UnfitError: the mask is neither causal nor a causal window.
    """
    zero = torch.zeros((), dtype=torch.int64)
    windows = set()
    for query in (_FAR, _FAR + 12345):
        keys = torch.arange(query + 64)
        row = torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(len(keys))
        count = int(row.sum())
        if not bool(row[query + 1 - count : query + 1].all()):
            raise _UnfitError("its attention mask is neither causal nor a sliding window")
        windows.add(None if count == query + 1 else count)
    if len(windows) != 1:
        raise _UnfitError("its attention mask divides the text into chunks")
    return windows.pop()


def _shape_of(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> _Shape:
    unknown = [name for name, value in options.items() if value is not None]
    if unknown := sorted(set(unknown) - _PASSED_ON):
        raise _UnfitError(f"its attention takes {', '.join(unknown)}, which ours does not have")
    if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
        raise _UnfitError("it attends to other tokens than those of the sequence (cross attention)")
    if q.shape[1] % k.shape[1] or v.shape[1] != k.shape[1] or v.shape[3] > k.shape[3]:
        shapes = [list(x.shape) for x in (q, k, v)]
        raise _UnfitError(f"the shapes of its q, k and v are {shapes}")
    window = None
    if mask is not None:
        if not hasattr(mask, "visible_window"):
            raise _UnfitError("it makes a mask or a bias of attention itself")
        window = mask.visible_window
    elif not getattr(module, "is_causal", True):
        raise _UnfitError("its tokens attend to later ones")
    scale = options.get("scaling")
    head_dim = q.shape[3]
    scale = head_dim**-0.5 if scale is None else float(scale)
    return _Shape(q.shape[1], k.shape[1], head_dim, v.shape[3], scale, window)


class _PagedLayer:
    """Attention of one call, with heads padded to the KV cache's size."""

    def __init__(self, shape: _Shape, padded_dim: int) -> None:
        self._pads = padded_dim != shape.head_dim or padded_dim != shape.value_dim
        self._value_dim = shape.value_dim
        self.attention = Attention(
            shape.num_heads,
            shape.num_kv_heads,
            padded_dim,
            shape.scale,
            sliding_window=shape.window,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `_Pass.attend`."""
        parts, padded_dim = (q, k, v), self.attention.head_dim
        if self._pads:
            parts = tuple(nn.functional.pad(x, (0, padded_dim - x.shape[3])) for x in parts)
        qkv = torch.cat([x.transpose(1, 2) for x in parts], dim=2)
        num_tokens = qkv.shape[1]
        out = self.attention.forward(qkv.view(num_tokens, -1), kv_cache, metadata)
        return out.view(1, num_tokens, -1, padded_dim)[..., : self._value_dim]


class _Step:
    """One forward pass of the engine."""

    def __init__(
        self, layers: list[_PagedLayer], kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> None:
        self._calls = zip(layers, kv_caches, strict=True)
        self._metadata = metadata

    def mask(self, visible: Callable[..., Any], device: torch.device) -> torch.Tensor:
        return torch.zeros(1, 1, 1, 1, device=device)

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer, kv_cache = next(self._calls)
        return layer.forward(q, k, v, kv_cache, self._metadata)


class _Given(nn.Module):
    """Stands where the class has its decoder, and answers with hidden states that are there: the
    class's own code then makes logits of them.

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
        self._refuse = lambda reason: ConfigError(
            f"{config.architecture} of {config.model} does not run on transformers' code: {reason}"
        )
        try:
            self._build(config, weights)
        except _UnfitError as error:
            raise self._refuse(str(error)) from None

    def _build(self, config: ModelConfig, weights: Weights) -> None:
        self._root = root = _empty_model(config, weights)
        self.base_prefix = f"{root.base_model_prefix}."
        plan = TensorParallelPlan(root, config, weights.parallel)
        replaced = _replace_layers(root, plan)
        allocate_parameters(root, weights)
        shapes = self._probe(weights.device)
        self._layers = _make_layers(shapes)
        for name, layer in replaced.items():
            layer.allocate(weights, name)
        weights.convert = CheckpointConversion(root, weights)

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to final hidden states `[num_wanted, hidden_size]`."""
        step = _Step(self._layers, kv_caches, metadata)
        hidden = self._hidden(step, token_ids.long(), metadata.positions.long())
        return keep_rows(hidden, metadata.wanted_rows)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        self._given.give(hidden.unsqueeze(0))
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._root(**_accepted(self._root, input_ids=ids)).logits[0]
        return logits

    def _hidden(self, one: _Pass, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with _running(one):
            output = self._base(input_ids=ids.unsqueeze(0), **self._positions(positions))
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _positions(self, positions: torch.Tensor) -> dict[str, Any]:
        found = {"position_ids": positions.unsqueeze(0), "use_cache": False}
        return {name: found[name] for name in self._takes}

    def _probe(self, device: torch.device) -> list[_Shape]:
        """Runs the class on a few tokens, with one layer's worth of attention replaced; finds its
        decoder, and returns the shapes of its attention calls.

        Raises:
            _UnfitError: its code fails, or a token's result depends on other tokens.
        """
        ids = torch.tensor(_PROBE_IDS, device=device)
        positions = torch.arange(_PROBE_START, _PROBE_START + len(ids), device=device)
        together, alone = _Probe(), _Probe()
        try:
            expected = self._find_base(together, ids, positions)
            hidden = self._hidden(alone, ids[-1:], positions[-1:])
            with _running(alone):
                found = self.compute_logits(hidden)[-1:]
        except (_UnfitError, ConfigError):
            raise
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise _UnfitError(f"its code fails ({type(error).__name__}: {first_line})") from error
        if not together.shapes:
            raise _UnfitError("its attention does not go through transformers' attention interface")
        if not torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-3):
            raise _UnfitError(
                "a token's result depends on other tokens outside attention (a state, a "
                "convolution, attention of its own), or on positions that it counts itself"
            )
        return together.shapes

    def _find_base(
        self, probe: _Probe, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Runs the whole class, and puts `_Given` where its decoder is: the outermost module that
        returned hidden states. Returns the last token's logits `[1, vocab_size]`."""
        root, found = self._root, {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if getattr(output, "last_hidden_state", None) is not None:
                    found[name] = type(output)

            return hook

        hooks = [m.register_forward_hook(note(name)) for name, m in root.named_modules() if name]
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
        try:
            with _running(probe):
                logits: torch.Tensor = root(**_accepted(root, **inputs)).logits
        finally:
            for hook in hooks:
                hook.remove()
        if not found:
            raise _UnfitError("it has no decoder that returns last_hidden_state")
        path = min(found, key=lambda name: name.count("."))
        self._base = root.get_submodule(path)
        self._takes = _accepted(self._base, position_ids=None, use_cache=None)
        self._given = _Given(found[path])
        root.set_submodule(path, self._given)
        return logits[0, -1:]


def _make_layers(shapes: list[_Shape]) -> list[_PagedLayer]:
    """One per attention call. All get the largest head size, padded to what the kernels take.

    Raises:
        _UnfitError: the numbers of KV heads differ, or heads are too large.
    """
    kv_heads = {shape.num_kv_heads for shape in shapes}
    if len(kv_heads) > 1:
        raise _UnfitError(f"its layers have different numbers of KV heads ({sorted(kv_heads)})")
    largest = max(shape.head_dim for shape in shapes)
    padded = -(-largest // _HEAD_DIM_STEP) * _HEAD_DIM_STEP
    if padded > _MAX_HEAD_DIM:
        raise _UnfitError(f"its heads have {largest} elements, the limit is {_MAX_HEAD_DIM}")
    return [_PagedLayer(shape, padded) for shape in shapes]


def _accepted(module: nn.Module, **wanted: Any) -> dict[str, Any]:
    """Returns the arguments that a module's `forward` takes."""
    parameters = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return wanted
    return {name: value for name, value in wanted.items() if name in parameters}


def _empty_model(config: ModelConfig, weights: Weights) -> Any:
    """Builds transformers' model with its parameters on the meta device; buffers have values.

    Raises:
        _UnfitError: what its configuration asks for does not fit into a paged cache.
    """
    fields = dict(config.hf_config)
    hf_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(hf_config)]
    if model_class.__name__ != config.architecture:
        raise _UnfitError(f"{model_class.__name__} is the decoder of its configuration")
    _check_config(hf_config, model_class, config.max_model_len)
    for name in ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache"):
        if getattr(hf_config, name, None):
            setattr(hf_config, name, False)
    with _parameters_on_meta():
        model = model_class._from_config(
            hf_config, attn_implementation=_INTERFACE, dtype=weights.dtype
        )
    return model.eval()


def _check_config(hf_config: Any, model_class: Any, max_model_len: int) -> None:
    if getattr(hf_config, "is_encoder_decoder", False):
        raise _UnfitError("it is the decoder of an encoder, whose states the cache does not hold")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise _UnfitError("its weights are quantised (quantization_config)")
    if getattr(model_class, "_is_stateful", False):
        raise _UnfitError("it keeps a state beside K and V, which the paged cache does not hold")
    types = set(getattr(hf_config, "layer_types", None) or ()) - _LAYER_TYPES
    if types:
        raise _UnfitError(
            f"it has layers of type {', '.join(sorted(types))}; the paged cache holds K and V of "
            f"{' and '.join(sorted(_LAYER_TYPES))}"
        )
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None)
    kind = (rope or {}).get("rope_type") or (rope or {}).get("type")
    limit = (rope or {}).get("original_max_position_embeddings")
    limit = limit or getattr(hf_config, "max_position_embeddings", 0)
    if kind in ("dynamic", "longrope") and max_model_len > limit:
        raise _UnfitError(
            f"its rotary positions ({kind}) change with the longest sequence of a batch beyond "
            f"{limit} tokens; set max_model_len to at most {limit}"
        )


_META_LOCK = threading.Lock()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the block, parameters that this thread makes take no memory; buffers do."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_empty(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if threading.get_ident() == thread and value is not None and not value.is_meta:
            value = nn.Parameter(value.detach().to("meta"), requires_grad=False)
        register(module, name, value)

    with _META_LOCK:
        nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _replace_layers(root: Any, plan: TensorParallelPlan) -> dict[str, LayerInPlace]:
    """Puts our layers where the model has its linear layers, embedding and head; returns them by
    name. They have no weights yet."""
    embedding, head = root.get_input_embeddings(), root.get_output_embeddings()
    replaced: dict[str, LayerInPlace] = {}
    names = {id(module): name for name, module in root.named_modules()}
    tied = None
    if type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale"):
        tied = EmbeddingInPlace(embedding)
        replaced[names[id(embedding)]] = tied
    if isinstance(head, nn.Linear):
        is_tied = head.weight is embedding.weight
        if tied is not None or not is_tied:
            replaced[names[id(head)]] = HeadInPlace(head, tied if is_tied else None)
    for name, module in root.named_modules():
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            replaced[name] = LinearInPlace(module, plan.style(name), plan.parallel)
    plan.divide_heads(root, replaced)
    for name, layer in replaced.items():
        root.set_submodule(name, layer)
    return replaced
