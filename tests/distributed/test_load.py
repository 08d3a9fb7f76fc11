"""Which bytes of a checkpoint the ranks read, and how many of them they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.matrix import only
from support.models import ModelShop
from support.subjects import BY_NAME
from support.tiny_llama import TinyLlama

from distributed.load_tasks import load
from distributed.ranks import Ranks
from tpengine import EngineArgs
from tpengine.config import ModelConfig

NAMES = (
    *("llama-biases", "mistral-window", "qwen2-tied", "qwen3-head-dim"),
    *("opt-before", "opt-after-projected", "bloom-8-heads", "phi3-partial", "gpt2-8-heads"),
    *("granite-odd", "smollm3-odd", "gpt_neox-odd"),
)
"""One or more variants of every family, with heads that four ranks divide."""
WHOLE = re.compile(
    r"norm|ln_|(o_proj|out_proj|down_proj|fc2|dense|dense_4h_to_h|c_proj)\.bias$"
    r"|embed_positions|project_(in|out)|wpe"
)
"""Tensors that every rank needs whole: vectors of the hidden size, and OPT's small tables."""
BIG = TinyLlama(64, 8, 4, hidden_size=512, intermediate_size=2048, num_layers=6, vocab_size=12_000)
"""About 130 MiB in float32, in one file."""
OVERHEAD_BYTES = 8 << 20
"""Memory of code that runs for the first time, of the allocator, and of the last 2 MiB page."""
MIB = 1 << 20


def model_config(folder: Path) -> ModelConfig:
    return EngineArgs(model=str(folder), dtype="float32").create_engine_config("cpu").model


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of each tensor of a checkpoint."""
    return {name: x.nbytes for name, x in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("name", only(("llama-biases", *NAMES[5:8], "gpt2-8-heads"), NAMES))
def test_a_checkpoint_is_asked_once(name: str, groups: dict[int, Ranks], tmp_path: Path) -> None:
    """Together the ranks read the checkpoint once, and again only what several of them hold."""
    BY_NAME[name].write(tmp_path / "model")
    config, sizes = model_config(tmp_path / "model"), sizes_in(tmp_path / "model")
    for num_ranks, ranks in groups.items():
        reports = ranks.run(load, config)
        assert all(report.asked_bytes.keys() <= sizes.keys() for report in reports)
        copies = {}
        for tensor, size in sizes.items():
            asked = sum(report.asked_bytes.get(tensor, 0) for report in reports)
            copies[tensor], rest = divmod(asked, size)
            assert rest == 0, tensor
        replicated = {tensor: n for tensor, n in copies.items() if n != 1}
        again = sum((n - 1) * sizes[tensor] for tensor, n in replicated.items())
        total = sum(sum(report.asked_bytes.values()) for report in reports)
        assert total == sum(sizes.values()) + again
        for tensor, n in replicated.items():
            if WHOLE.search(tensor):
                assert n == num_ranks, tensor
            else:  # a KV head that several ranks hold
                assert re.search(r"\.[kv]_proj\.", tensor), tensor
                assert n * config.total_num_kv_heads == num_ranks
        assert all(replicated.get(tensor) for tensor in sizes if WHOLE.search(tensor))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_holds_more_than_its_share(num_ranks: int, models: ModelShop) -> None:
    """Resident memory as the kernel counts it: the share after loading, and at most the share and
    the largest tensor while loading."""
    config, sizes = model_config(models.folder(BIG)), sizes_in(models.folder(BIG))
    whole, largest = sum(sizes.values()), max(sizes.values())
    # New processes: memory that another test freed would be used again.
    with Ranks(num_ranks) as ranks:
        reports = ranks.run(load, config)
    for report in reports:
        share = sum(report.asked_bytes.values())
        assert whole / num_ranks <= share < whole / num_ranks + MIB
        assert report.weights_bytes == pytest.approx(share, rel=0.02)
        assert 0.9 * share < report.held_bytes < share + OVERHEAD_BYTES
        assert report.peak_bytes < share + largest + OVERHEAD_BYTES
