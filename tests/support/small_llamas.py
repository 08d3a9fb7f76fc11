"""Small random models, engines on them, and plain transformers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.engines import make_engine as new_engine
from support.engines import serve
from tpengine import LLMEngine, RequestOutput, SamplingParams

VOCAB_SIZE = 256
SHAPES = {  # heads, KV heads, head_dim, layers
    "grouped": (4, 2, 16, 2),
    "equal": (2, 2, 32, 2),
    "single": (4, 1, 16, 3),
}
MakeEngine = Callable[..., LLMEngine]


def write_llama(
    folder: Path, heads: int, kv_heads: int, head_dim: int, layers: int, vocab_size: int, seed: int
) -> None:
    """Writes a random Llama whose weights are large enough that every part of a prompt matters."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).float().save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama of each shape."""
    folders = {}
    for seed, (name, shape) in enumerate(SHAPES.items(), start=40):
        folders[name] = tmp_path_factory.mktemp(name)
        write_llama(folders[name], *shape, VOCAB_SIZE, seed)
    return folders


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Any]:
    """The same models in transformers."""
    return {
        name: transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }


@pytest.fixture
def make_engine(folders: dict[str, Path]) -> Iterator[MakeEngine]:
    """Makes engines of little memory; they are shut down when the test ends."""
    engines = []

    def make(model: str = "grouped", **args: Any) -> LLMEngine:
        args = {"max_model_len": 128, "block_size": 8, "swap_space": 0.0, **args}
        args = {"num_device_blocks_override": 200, "max_num_batched_tokens": 64, **args}
        engine = new_engine(folders[model], **{"max_num_seqs": 32, **args})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


Job = tuple[str, list[int], SamplingParams]


def run(engine: LLMEngine, jobs: list[Job]) -> dict[str, RequestOutput]:
    """Serves requests side by side; the last output of each."""
    names, prompts, params = zip(*jobs, strict=True)
    return dict(zip(names, serve(engine, prompts, params), strict=True))
