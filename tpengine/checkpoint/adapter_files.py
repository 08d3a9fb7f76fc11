"""LoRA adapters in PEFT's folders: what a folder holds, and whether this engine can serve it.

`read_adapter` is the one reader: the driver calls it when a request names a folder, so that only
that request fails, and each rank calls it again when it loads the tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from tpengine.checkpoint.text_names import whole_names
from tpengine.errors import InvalidAdapterError
from tpengine.inputs import Adapter, LoRARequest
from tpengine.layers.adapter_parts import AdapterPart, Targets

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MOST_PROBLEMS = 8
_MOST_KNOWN = 4096
_PATTERNS_S = 1.0
"""Of a processor, for all matches of an adapter's patterns, each of which takes microseconds."""
_LARGEST_SCALING = float(np.finfo(np.float32).max)
_DAMAGED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    SafetensorError,
)
"""What the fields and the tensors of an arbitrary file may raise."""
_EXPONENTS: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""By type of a tensor: its numbers as words, and the bits that NaN and infinity have set."""
_READ = (
    "r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules "
    "layers_to_transform layers_pattern"
)
_NO_EFFECT = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "lora_dropout fan_in_fan_out loftq_config eva_config corda_config lora_ga_config "
    "megatron_core qalora_group_size runtime_config ensure_weight_tying"
)
"""Keys that say how the adapter was trained, not what it computes. `fan_in_fan_out` is one of them:
A and B of a transposed layer have the shapes of any other layer's."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other ways to begin a training change the base's weights.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""Values that do not change the forward pass. A key of no table must have an empty value."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that was read and can be served.

    Attributes:
        key: SHA-256 over its two files.
        parts: by the model's name of the layer.
        data: the file of tensors, in the format of safetensors.
    """

    key: bytes
    parts: Mapping[str, AdapterPart]
    data: bytes


class AdapterChecks:
    """Checks the adapters of requests; any thread may call it. A folder is read again only when its
    files have changed.

    Args:
        max_rank: highest rank; 0: the engine serves no adapters.

    """

    def __init__(self, targets: Targets, max_rank: int) -> None:
        self._targets = targets
        self._max_rank = max_rank
        self._known: OrderedDict[str, _KnownFolder] = OrderedDict()  # the oldest first

    @property
    def ids(self) -> set[int]:
        """Ids of adapters that can be served: of each folder the one that a request gave last."""
        return {folder.lora_int_id for folder in list(self._known.values())}

    def check(self, request: LoRARequest | None) -> Adapter | None:
        """Returns what a request for this adapter needs; None: for none.

        Raises:
            InvalidAdapterError: it cannot be served; the message says what does not fit.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise InvalidAdapterError(
                f"lora_request must be a LoRARequest, got {request!r:.80}; ids go into inputs"
            )
        if not self._max_rank:
            raise InvalidAdapterError(
                f"lora_request = {request!r:.200}, and this engine serves no adapters; make it "
                "with enable_lora=True (--enable-lora)"
            )
        path = request.lora_path
        try:
            stats = [(Path(path) / name).stat() for name in (CONFIG_FILE, TENSOR_FILE)]
        except (OSError, TypeError, ValueError) as error:
            raise _unreadable(path, error) from error
        if not all(stat.S_ISREG(status.st_mode) for status in stats):  # a pipe may never end
            raise _unreadable(path, "one of its files is no regular file")
        state = tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in stats)
        known = self._known.get(path)
        if known is not None and known.state == state:
            key = known.key
        else:
            key = read_adapter(path, self._targets, self._max_rank).key
        self._known[path] = _KnownFolder(state, key, request.lora_int_id)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return Adapter(request, key)


@dataclass(frozen=True, slots=True)
class _KnownFolder:
    """A folder that was read: the state of its files at that time, and its last request's id."""

    state: tuple[tuple[int, int, int], ...]
    key: bytes
    lora_int_id: int


def read_adapter(path: str, targets: Targets, max_rank: int) -> AdapterFolder:
    """Reads an adapter and checks it against the model's layers.

    Raises:
        InvalidAdapterError: files are missing or damaged, a field changes the forward pass in a way
            that is not served, or tensors do not fit; the message names all of it.
    """
    try:
        written, data = (Path(path, name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE))
        tensors = dict(sorted(deserialize(data)))
        shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
        reader = _Reader(json.loads(written), shapes, targets, max_rank)
        problems = [*reader.fields(), *reader.tensors(), *_unusable_numbers(tensors)]
    except TimeoutError as error:
        problems = [str(error)]
    except OSError as error:
        raise _unreadable(path, error) from error
    except _DAMAGED as error:
        raise InvalidAdapterError(
            f"the adapter in {path!r} cannot be read: {type(error).__name__}: {error}; a file is "
            "damaged, or a field has a wrong type"
        ) from error
    if problems:
        shown, more = problems[:_MOST_PROBLEMS], len(problems) - _MOST_PROBLEMS
        rest = f"; and {more} more" if more > 0 else ""
        raise InvalidAdapterError(
            f"the adapter in {path!r} cannot be served: {'; '.join(shown)}{rest}"
        )
    digest = hashlib.sha256(hashlib.sha256(written).digest())
    digest.update(data)
    return AdapterFolder(digest.digest(), reader.parts, data)


def _unreadable(path: str, error: Exception | str) -> InvalidAdapterError:
    advice = (
        f"its folder needs {CONFIG_FILE} and {TENSOR_FILE}, which PEFT's save_pretrained writes"
    )
    if isinstance(error, FileNotFoundError) and Path(path, _PICKLE).exists():
        advice = (
            f"it has {_PICKLE}, a pickle, which can run code when it is read; save it again with "
            "safe_serialization=True"
        )
    reason = getattr(error, "strerror", None) or error
    return InvalidAdapterError(f"the adapter in {path!r:.300} cannot be read: {reason}; {advice}")


def _unusable_numbers(tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields tensors of a type that PEFT does not write, or with NaN or an infinity in them."""
    for name, tensor in tensors.items():
        dtype = tensor["dtype"]
        if dtype not in _EXPONENTS:
            yield f"{name} is {dtype}, and must be {', '.join(_EXPONENTS)}"
            continue
        word, exponent = _EXPONENTS[dtype]
        if ((np.frombuffer(tensor["data"], word) & exponent) == exponent).any():
            yield f"{name} has NaN or infinite numbers"


@dataclass
class _Reader:
    """Compares a configuration with the tensors and with the model.

    Attributes:
        shapes: of the file's tensors, by name.
        parts: filled by `tensors`.
        taken_s: of a processor, for matches of patterns until now.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    targets: Targets
    max_rank: int
    parts: dict[str, AdapterPart] = field(default_factory=dict)
    taken_s: float = 0.0

    def fields(self) -> Iterator[str]:
        """Yields the fields that change the forward pass in a way that is not served."""
        for key, value in self.config.items():
            is_harmless = not value or key in f"{_READ} {_NO_EFFECT}".split()
            if not is_harmless and value not in _NEUTRAL.get(key, ()):
                yield f"{key} = {value!r:.60} in {CONFIG_FILE} is not served"

    def tensors(self) -> Iterator[str]:
        """Yields tensors that are unknown, missing or misshapen; fills `parts`."""
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        sizes = {target: size for target, size in self.targets.items() if size is not None}
        others = self.targets.keys() - sizes.keys()
        matches = {name: _TENSOR.fullmatch(name) for name in self.shapes}
        layers = whole_names([match[1] for match in matches.values() if match], sizes, others)
        hint = "only the layers of the text half can be adapted; train with exclude_modules"
        hint = f"; {hint}" if others else ""
        for name, match in matches.items():
            if match is None or match[1] not in layers:
                yield f"{name} is of no linear layer that takes an adapter here{hint}"
                hint = ""  # once is enough
            else:
                shapes[match[1], match[2]] = self.shapes[name]
        present = {name for name, _ in shapes}
        for name, target in layers.items():
            outputs, inputs = sizes[target]
            if not self._is_targeted(name):
                if name in present:
                    yield f"{name} has tensors, but the fields of {CONFIG_FILE} leave it out"
                continue
            part = self.parts[target] = self._part(name)
            if not 1 <= part.rank <= self.max_rank:
                limit = f"max_lora_rank = {self.max_rank}"
                yield f"the rank of {name} is {part.rank}, and must be from 1 to {limit}"
            if not abs(part.scaling) <= _LARGEST_SCALING:
                yield f"the scaling of {name} is {part.scaling}; lora_alpha must be finite"
            for which, needed in (("A", (part.rank, inputs)), ("B", (outputs, part.rank))):
                own = shapes.get((name, which))
                if own != needed:
                    has = f"lora_{which} of {name} is {'missing' if own is None else list(own)}"
                    yield f"{has}, and must be {list(needed)}"
        if not self.parts:
            yield "it has no layer of this model"

    def _part(self, name: str) -> AdapterPart:
        config = self.config
        rank = index(self._value(config.get("rank_pattern"), name, config["r"]))
        alpha = float(self._value(config.get("alpha_pattern"), name, config["lora_alpha"]))
        divisor = float(max(1, rank))
        scaling = alpha / (divisor**0.5 if config.get("use_rslora") else divisor)
        return AdapterPart(name, rank, scaling)

    def _is_targeted(self, name: str) -> bool:
        """Whether PEFT gives this layer an adapter."""
        config = self.config
        wanted = config["target_modules"]
        is_excluded = self._fits(config.get("exclude_modules") or (), name)
        if is_excluded or not (wanted == "all-linear" or self._fits(wanted, name)):
            return False
        layers = config.get("layers_to_transform")
        if isinstance(wanted, str) or layers is None or layers == []:
            return True
        patterns = config.get("layers_pattern") or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if match := self._match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False

    def _match(self, pattern: str, name: str, is_whole: bool = False) -> Any:
        """Matches a pattern of the configuration, as PEFT does, with the beginning of a name, or
        with the whole; None: it does not match. Some take a time that grows exponentially with the
        name, so all matches together have a bound.

        Raises:
            TimeoutError: they take longer.
            ValueError: the pattern is wrong.
        """
        import regex  # as `re`, but it can be stopped

        start, call = time.thread_time(), regex.fullmatch if is_whole else regex.match
        try:
            match = call(pattern, name, timeout=_PATTERNS_S)
            self.taken_s += time.thread_time() - start
        except regex.error as error:
            raise ValueError(f"pattern {pattern!r:.80}: {error}") from error
        except TimeoutError:  # it counts all threads of the process
            self.taken_s = float("inf")
        if self.taken_s > _PATTERNS_S:
            text = f"to match {pattern!r:.80} takes more than {_PATTERNS_S:g} s of a processor"
            raise TimeoutError(f"{text}; write a simpler pattern, or list the layers")
        return match

    def _fits(self, wanted: str | list[str] | tuple[str, ...], name: str) -> bool:
        """Whether a name is, or ends with, one of those wanted; a text is a pattern of all."""
        if isinstance(wanted, str):
            return self._match(wanted, name, is_whole=True) is not None
        return any(name == target or name.endswith(f".{target}") for target in wanted)

    def _value(self, values: Mapping[str, Any] | None, name: str, default: Any) -> Any:
        """Returns the value of the first pattern that the end of a name matches."""
        for pattern, value in (values or {}).items():
            if self._match(rf"(.*\.)?({pattern})$", name):
                return value
        return default
