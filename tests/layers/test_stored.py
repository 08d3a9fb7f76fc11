"""Weights that keep the numbers of a quantised file, against the file's dequantised values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.torch import load_file
from support.bare_model import BareModel, logits_in_transformers
from support.gguf_files import write_gguf
from support.models import ModelShop
from support.programs import python
from support.ranks import OwnPart, run_ranks
from support.rounded_rows import round_rows
from support.tiny_llama import TinyLlama
from torch import nn
from transformers import AutoModelForCausalLM

from layers.test_quantized import BOUND, difference, rounding_hook
from tpengine.checkpoint.gguf_file import TensorEntry
from tpengine.checkpoint.gguf_groups import unpack
from tpengine.checkpoint.gguf_weights import QuantizedTensor, Rows, read_tensors
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers import linear
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.moe import Router
from tpengine.layers.weights import LoadedTensor, RangeError, TensorSource, Weights

CPU = torch.device("cpu")
FACTORS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""By type: where a block has its factors in float16. All other bytes may have any value."""
BITS = {"Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 5.0}
"""Bits a weight in memory; all others: 8.5."""
EXACT = {"Q4_0": 1e-5, "Q4_1": 1e-5, "Q5_0": 1e-5, "Q8_0": 1e-5, "IQ4_NL": 1e-5, "Q4_K": 1e-3}
"""Largest `difference` of a product. All other types are rounded to 8 bits."""
TO_EIGHT_BITS = 0.01


class Files:
    """Writes tensors of random blocks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "blocks"
        self._rng = np.random.default_rng(0)

    def __call__(
        self,
        kind: str,
        rows: int,
        columns: int,
        order: Rows | None = None,
        transposed: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor]:
        """Returns a source, and its values as the library `gguf` has them."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        count = rows * columns // block
        data = self._rng.integers(0, 256, (count, block_bytes), np.uint8)
        for at in FACTORS[kind]:
            factors = self._rng.uniform(0.5, 2.0, count).astype(np.float16)
            data[:, at : at + 2] = factors.view(np.uint8).reshape(count, 2)
        with self._path.open("ab") as file:
            start = file.tell()
            file.write(data.tobytes())
        row_bytes = columns // block * block_bytes
        entry = TensorEntry(self._path, (rows, columns), kind, start, row_bytes)
        values = dequantize(data.reshape(rows, row_bytes), GGMLQuantizationType[kind])
        values = values if order is None else values[order]
        return QuantizedTensor(entry, order, transposed=transposed), torch.from_numpy(values)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def stored_weights(rank: int = 0, tp_size: int = 1) -> Weights:
    return Weights(torch.float32, CPU, ParallelState(rank, tp_size, OwnPart()), as_stored=True)


def loaded(weights: Weights, **sources: TensorSource) -> Weights:
    for name, source in sources.items():
        weights.read(f"{name}.weight", source)
    weights.finish()
    return weights


def check(layer: linear.Linear, expected: torch.Tensor, x: torch.Tensor, bound: float) -> None:
    """Holds a layer against its dequantised weight."""
    assert difference(layer.forward(x), round_rows(x) @ expected.t()) < bound


@pytest.mark.parametrize("kind", FACTORS)
def test_a_layer_of_every_type(kind: str, files: Files) -> None:
    source, values = files(kind, 80, 1024)
    x = torch.randn(9, 1024)
    weights = stored_weights()
    layer = linear.ReplicatedLinear(weights, "one", 1024, 80)
    loaded(weights, one=source)
    check(layer, values, x, EXACT.get(kind, TO_EIGHT_BITS))
    assert weights.num_bytes == 96 * 1024 * BITS.get(kind, 8.5) / 8
    stored = f"{4 if kind in BITS else 8} bits as stored"
    assert weights.form == (stored if kind in EXACT else "rounded to 8 bits in groups of 32")
    table = VocabParallelEmbedding(other := stored_weights(), "one", 80, 1024)
    loaded(other, one=source)
    rows = table.forward(torch.arange(80, dtype=torch.int32))
    assert difference(rows, values) < EXACT.get(kind, TO_EIGHT_BITS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "kinds", [("Q4_0",) * 3, ("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "F32", "Q4_1")]
)
def test_parts_of_a_layer_keep_their_types(kinds: tuple[str, ...], rank: int, files: Files) -> None:
    """Ranks take heads; rows of q stand in another order in the file."""
    order = np.arange(256).reshape(4, 32, 2).swapaxes(1, 2).ravel()
    weights, x = stored_weights(rank, 2), torch.randn(5, 512)
    sizes = SimpleNamespace(hidden_size=512, total_num_heads=4, head_dim=64)
    layer = linear.QKVParallelLinear(weights, ["q", "k", "v"], sizes, 2, False)
    sources: dict[str, TensorSource] = {}
    parts = []
    for name, kind, rows in zip("qkv", kinds, (256, 128, 128), strict=True):
        if kind == "F32":
            values = torch.randn(rows, 512)
            sources[name] = LoadedTensor(values)
        else:
            sources[name], values = files(kind, rows, 512, order if name == "q" else None)
        parts.append(values.chunk(2)[rank])
    loaded(weights, **sources)
    outs = layer.forward(x).split([128, 64, 64], dim=1)
    for kind, out, part in zip(kinds, outs, parts, strict=True):
        rounded = x if kind == "F32" else round_rows(x)
        assert difference(out, rounded @ part.t()) < EXACT.get(kind, TO_EIGHT_BITS)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_padded_shares(rank: int, files: Files) -> None:
    """Three ranks divide 320 numbers into 112, 112 and 96: the second layer cuts its groups. Of 64
    numbers the last rank has none."""
    for size, share in ((320, 112), (64, 32)):
        up, up_values = files("Q4_0", size, 64)
        down, down_values = files("Q4_0", 48, size)
        weights = stored_weights(rank, 3)
        first = linear.MergedColumnParallelLinear(weights, ["up"], 64, [size])
        second = linear.RowParallelLinear(weights, "down", size, 48)
        loaded(weights, up=up, down=down)
        own = slice(rank * share, min(size, (rank + 1) * share))
        padding = share - len(up_values[own])
        x, y = torch.randn(4, 64), torch.randn(4, share)
        expected = round_rows(x) @ up_values[own].t()
        actual = first.forward(x)
        torch.testing.assert_close(actual[:, : share - padding], expected, rtol=0, atol=1e-3)
        assert not actual[:, share - padding :].any()
        y[:, share - padding :] = 0
        if padding == share:
            assert not second.forward(y).any()
        else:
            check(second, F.pad(down_values[:, own], (0, padding)), y, TO_EIGHT_BITS)


def test_rows_and_columns_in_another_order(files: Files) -> None:
    source, values = files("Q4_0", 192, 64)
    x, weights = torch.randn(3, 64), stored_weights(1, 2)
    sizes = SimpleNamespace(hidden_size=64, total_num_heads=4, head_dim=16)
    layer = linear.InterleavedQKVParallelLinear(weights, "qkv", sizes, False)
    loaded(weights, qkv=source)
    check(layer, values.view(4, 3, 16, 64)[2:].transpose(0, 1).flatten(0, 2), x, EXACT["Q4_0"])
    source, values = files("Q4_0", 96, 64, transposed=True)
    weights = stored_weights(1, 2)
    layer = linear.MergedColumnParallelLinear(weights, ["up"], 64, [96])
    weights.transpose(("up.weight",))
    loaded(weights, up=source)
    check(layer, values[48:], x, EXACT["Q4_0"])
    assert weights.stored_bits == {4}


def test_a_digest_sees_every_part(files: Files) -> None:
    def digest(*sources: TensorSource) -> str:
        weights = stored_weights()
        linear.MergedColumnParallelLinear(weights, ["a", "b"], 64, [32, 32])
        return loaded(weights, **dict(zip("ab", sources, strict=True))).digest

    a, b, c = (files("Q4_1", 32, 64)[0] for _ in range(3))
    assert digest(a, b) == digest(a, b)
    assert len({digest(a, b), digest(a, c), digest(b, a), digest(b, c)}) == 4


def test_what_is_dequantised(files: Files) -> None:
    source, values = files("Q4_0", 32, 64)
    weights = stored_weights()
    router = Router(weights, "gate", 64, 32)
    x = torch.randn(3, 64)
    assert loaded(weights, gate=source).form == "dequantised to float32"
    torch.testing.assert_close(router.forward(x), x @ values.t(), rtol=1e-5, atol=1e-4)
    weights = Weights(torch.float32, CPU, ParallelState(), "int8")
    linear.ReplicatedLinear(weights, "one", 64, 32)
    assert loaded(weights, one=source).form == "dequantised to float32, then rounded to int8"


def test_scales_beyond_float16() -> None:
    """Of a file whose factors are too large together, and of values that are rounded."""
    blocks = torch.full((1, 1, 144), 255, dtype=torch.uint8)
    blocks[..., :4] = torch.tensor([2000.0, 0.5]).half().view(torch.uint8)
    with pytest.raises(RangeError, match="126000"):
        unpack("Q4_K", blocks, slice(0, 256))
    for kind in ("int8", "int4"):
        weights = Weights(torch.float32, CPU, ParallelState(), kind)
        linear.ReplicatedLinear(weights, "one", 64, 32)
        with pytest.raises(RangeError, match=r"scale of its numbers .* 65504"):
            weights.read("one.weight", LoadedTensor(torch.full((32, 64), -1e9)))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Q4_0", TinyLlama(64, 4, 2, tied=True)),
        ("Q4_1", TinyLlama(64, 4, 4, hidden_size=128)),
        ("Q8_0", TinyLlama(64, 4, 2, intermediate_size=190)),
    ],
)
def test_model(kind: str, spec: TinyLlama, tp_size: int, models: ModelShop, tmp_path: Path) -> None:
    """Against transformers with the file's values and inputs rounded to 8 bits."""
    folder = models.folder(spec)
    path = write_gguf(folder, tmp_path / "model.gguf", kind, {"tokenizer.ggml.eos_token_id": 2})
    names = load_file(folder / "model.safetensors")
    values = {name: source[:] for _, name, source in read_tensors(str(path), names)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(values, strict=False)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.in_features % 32 == 0:
            layer.register_forward_pre_hook(
                rounding_hook(tp_size if "o_proj" in name or "down" in name else 1)
            )
    expected = logits_in_transformers(model)
    build = partial(BareModel, path, as_stored=True)
    answers, _ = run_ranks(tp_size, lambda parallel: build(parallel).logits())
    assert difference(answers[0], expected) < BOUND


@pytest.mark.soak
def test_loading_takes_the_memory_of_the_forms(tmp_path: Path) -> None:
    """In a process of its own: RssAnon and RssShmem at their peak, less those before the load."""
    done = python("-m", "support.load_memory", tmp_path)
    for line in done.stdout.splitlines():
        peak_bytes, weights_bytes, file_bytes = map(int, line.split()[1:])
        assert peak_bytes < 1.3 * weights_bytes, line
        assert weights_bytes < 1.15 * file_bytes, line
    assert len(done.stdout.splitlines()) == 4
