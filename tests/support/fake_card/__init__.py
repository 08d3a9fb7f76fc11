"""A GPU that is not there: `torch.cuda` shows one card whose memory is the host's.

Programs, tests and benchmarks for a GPU run on it line by line, where there is no GPU: a tensor of
the card is a `CardTensor`, which says that it is on `cuda:0`, refuses to meet tensors of the host,
and computes by plain torch; graphs note what is called and call it again; copies, streams and
events do nothing that takes time. It says nothing of speed, nothing of the compiled kernels (ops
are their plain-torch references), and nothing of the driver.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_map

CARD = torch.device("cuda", 0)
IN_A_PROCESS = (
    f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    "from support import fake_card; fake_card.install()"
)
"""For `python -c`: the card stays in that process."""
NAME = "fake card (no GPU)"
TOTAL_BYTES = 4 << 30
_Tensor = torch.Tensor
_FACTORIES = (
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "tensor", "zeros",
)  # fmt: skip
_READS = ("cpu", "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "equal")
_MAY_MEET_HOST = ("copy_", "__getitem__", "__setitem__", "index_put_")
_ANSWERS: dict[str, Any] = {"device": CARD, "is_cuda": True, "is_cpu": False, "get_device": 0}


class Memory:
    """What tensors of the card hold."""

    held = peak = 0

    @classmethod
    def take(cls, num_bytes: int) -> Bytes:
        if num_bytes > TOTAL_BYTES - cls.held:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        return Bytes(num_bytes)


class Bytes:
    """A piece of the card's memory, free when the last tensor that lies in it is gone."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        Memory.held += num_bytes
        Memory.peak = max(Memory.peak, Memory.held)

    def __del__(self) -> None:
        Memory.held -= self.num_bytes


class CardTensor(torch.Tensor):
    """A tensor of the card; `host` is what it is made of."""

    host: torch.Tensor
    piece: Bytes

    @staticmethod
    def __new__(cls, host: torch.Tensor, piece: Bytes | None = None) -> CardTensor:
        self = _Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), strides=host.stride(), dtype=host.dtype, device="meta"
        )
        self.host = host
        self.piece = piece or Memory.take(host.untyped_storage().nbytes())
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def record_stream(self, _: Any) -> None:  # type: ignore[override]
        """There is nothing to wait for."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"the fake card does not know how {func} got here")


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    recording: Graph | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[tuple[Callable[[], Any], list[torch.Tensor]]] = []

    def replay(self) -> None:
        for call, outputs in self.calls:
            found = [one for one in tree_flatten(call())[0] if isinstance(one, _Tensor)]
            for output, new in zip(outputs, found, strict=True):
                if output.data_ptr() != new.data_ptr():
                    output.copy_(new)

    def reset(self) -> None:
        self.calls.clear()


@contextlib.contextmanager
def _record(graph: Graph, **_: Any) -> Iterator[None]:
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None


def _run(call: Callable[[], Any]) -> Any:
    """Calls; while a graph is recorded it notes the call, and where its results lie."""
    result = call()
    if Graph.recording is not None:
        outputs = [one for one in tree_flatten(result)[0] if isinstance(one, _Tensor)]
        Graph.recording.calls.append((call, outputs))
    return result


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = func.__self__.__name__
    return name


def _on_card(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    if name in _ANSWERS:
        return _ANSWERS[name]
    if name in ("numpy", "pin_memory"):
        raise TypeError(f"can't convert cuda:0 device type tensor: {name} needs one of the host")
    given = tree_flatten((args, kwargs))[0]
    cards = [one for one in given if isinstance(one, CardTensor)]
    if name in ("to", "type", "new_empty", "new_zeros", "new_full", "cuda"):
        args, kwargs, goes_down = _without_device(name, args, kwargs)
    else:
        goes_down = name == "cpu" or (
            "device" in kwargs and not _on_card(kwargs.pop("device", None) or CARD)
        )
    is_host = [isinstance(one, _Tensor) and not isinstance(one, CardTensor) for one in given]
    far = [one for one, is_one in zip(given, is_host, strict=True) if is_one and one.dim()]
    reads = goes_down or name in _READS or (name == "copy_" and not isinstance(args[0], CardTensor))
    if reads and name != "copy_" and Graph.recording is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
    if far and name not in _MAY_MEET_HOST:
        raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
    host_args, host_kwargs = tree_map(_host_of, (args, kwargs))
    result = _run(lambda: _plain(func)(*host_args, **host_kwargs))
    pieces = {one.host.untyped_storage().data_ptr(): one for one in cards}

    def wrap(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if goes_down:
            return one.clone() if one.untyped_storage().data_ptr() in pieces else one
        same = [card for card in given if card is not None and _host_of(card) is one]
        if same:
            return same[0]
        source = pieces.get(one.untyped_storage().data_ptr())
        return CardTensor(one, None if source is None else source.piece)

    return tree_map(wrap, result)


def _host_of(one: Any) -> Any:
    if isinstance(one, CardTensor):
        return one.__dict__["host"]
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _without_device(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments without the device they name, and whether it is the host."""
    devices = [one for one in args[1:] if isinstance(one, torch.device | str)]
    device = kwargs.pop("device", None) or (devices[0] if devices else None)
    rest = tuple(one for one in args[1:] if not isinstance(one, torch.device | str))
    other = next((one for one in rest if name == "to" and isinstance(one, _Tensor)), None)
    if other is not None:
        rest = (other.dtype, *(one for one in rest if one is not other))
        device = other.device
    if name == "to" and not rest and not kwargs:
        rest = (args[0].dtype,)
    return (args[0], *rest), kwargs, device is not None and not _on_card(device)


def _plain(func: Any) -> Any:
    """What computes on the host: an op of this package by its reference."""
    module, *names = str(func).split(".")
    if module == "tpengine":
        from tpengine.ops import library

        return library.REFERENCES[names[0]]
    return _varlen if (module, *names[:1]) == ("torch_attn", "_varlen_attn") else func


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor,
    key_start: torch.Tensor, max_q: int, max_k: int, is_causal: bool = False,
    scale: float | None = None, window_size: Any = (-1, -1), *_: Any, **__: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """torch's attention over packed sequences, one by one."""
    out = torch.empty_like(q)
    for first, end, key, key_end in zip(
        query_start[:-1], query_start[1:], key_start[:-1], key_start[1:], strict=True
    ):
        distance = torch.arange(int(key_end - key)) - torch.arange(
            int(key_end - key) - int(end - first), int(key_end - key)
        ).unsqueeze(1)
        left = window_size[0] if window_size[0] >= 0 else int(key_end)
        mask = (distance <= 0) & (distance >= -left)
        groups = q.shape[1] // k.shape[1]
        keys, values = (x[key:key_end].repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        rows = F.scaled_dot_product_attention(
            q[first:end].transpose(0, 1), keys, values, attn_mask=mask, scale=scale
        )
        out[first:end] = rows.transpose(0, 1)
    return out, torch.empty(0), torch.empty(0)


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if not _on_card(device):
            if device is not None:
                kwargs["device"] = device
            return original(*args, **kwargs)
        if original.__name__ == "empty" and isinstance(args[0], int | tuple | torch.Size):
            shape = args[0] if isinstance(args[0], tuple) else args
            item = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
            Memory.take(item * int(torch.Size(shape).numel()))
        return CardTensor(_run(lambda: original(*args, **kwargs)))

    return make


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to`, which brings tensors of the host to the card."""
    devices = [kwargs.get("device"), *(one for one in args if isinstance(one, torch.device | str))]
    others = [one for one in args if isinstance(one, CardTensor)]
    if isinstance(self, CardTensor) or not (others or any(map(_on_card, devices))):
        return _ORIGINAL_TO(self, *args, **kwargs)
    if Graph.recording is not None:
        raise RuntimeError("operation not permitted when stream is capturing: to the card")
    kept, kwargs, _ = _without_device("to", (self, *args), dict(kwargs))
    return CardTensor(_ORIGINAL_TO(self, *kept[1:], **kwargs).clone())


_ORIGINAL_TO = torch.Tensor.to


class Generator(torch.Generator):
    """Of the host, wherever it is wanted."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


class Stream:
    """In which everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CARD

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """Of the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def wait(self, *_: Any) -> None:
        pass

    synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return max(1e-4, 1e3 * (end.at - self.at))


def _properties(*_: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=132, L2_cache_size=50 << 20,
        total_memory=TOTAL_BYTES, shared_memory_per_block_optin=227 << 10, uuid="fake-card",
    )  # fmt: skip


_ORIGINAL_PROFILE = torch.profiler.profile


def _profile() -> Any:
    """Of the host alone: the card's own profiler complains at every op where there is no driver."""
    return _ORIGINAL_PROFILE(activities=[torch.profiler.ProfilerActivity.CPU])


class Kernels:
    """In place of the compiled library."""

    def tpengine_cuda_decode_wave(self, *_: int) -> int:
        return 33


def install() -> None:
    """From here on there is a card, for all that is imported later, too."""
    _device_constructors()  # remembers the originals, which `with torch.device(...)` looks for
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.Tensor.to = _to  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = torch.Tensor.clone  # type: ignore[assignment, method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    stream = Stream()

    def held(*_: Any) -> int:
        return Memory.held

    def reset_peak(*_: Any) -> None:
        Memory.peak = Memory.held

    card: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: Graph.recording is not None,
        "mem_get_info": lambda *_: (TOTAL_BYTES - Memory.held, TOTAL_BYTES),
        "memory_reserved": held,
        "memory_allocated": held,
        "max_memory_allocated": lambda *_: Memory.peak,
        "reset_peak_memory_stats": reset_peak,
        "current_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _record,
        "graph_pool_handle": lambda: (0, 0),
    }
    for name in ("init", "_lazy_init", "set_device", "synchronize", "empty_cache"):
        card[name] = lambda *_: None
    for name, value in card.items():
        setattr(torch.cuda, name, value)
    torch.profiler.profile = _profile  # type: ignore[misc, assignment]
    from tpengine.ops import library

    library.cuda_library = Kernels()  # type: ignore[assignment]


def shrink() -> None:
    """Benchmarks take sizes that a CPU computes in seconds."""
    from benchmarks import card_times, kernel_rows

    from tpengine.bench import harness, latency, timing

    timing.COPY_BYTES, timing.REPEATS = 1 << 20, 1
    card_times.MATMUL_SIZE, card_times.BUS_BYTES = 64, 1 << 16
    kernel_rows.Setting = functools.partial(kernel_rows.Setting, shrink=256)  # type: ignore
    harness.SHAPES["llama-3-8b"] |= {
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 512,
        "max_position_embeddings": 1200,
    }
    mixed_requests, parse = harness.mixed_requests, latency.LatencyOptions.parse

    def short_requests(count: int, vocab_size: int, seed: int, longest: int, run: int = 0) -> Any:
        return mixed_requests(count, vocab_size, seed, 16, run)

    def parse_short(args: Any) -> Any:
        options = parse(args)
        options.input_len = 20
        return options

    harness.mixed_requests = short_requests
    latency.LatencyOptions.parse = parse_short  # type: ignore[method-assign, assignment]
