"""The memory of a load: `python -m support.load_memory FOLDER`.

Writes a Llama of 150 million parameters as a GPTQ folder and as GGUF files, and prints for each
load its name, the peak of RssAnon + RssShmem above that before the load, the bytes of the weights,
and those of the file, or of whole bytes or half bytes for all weights.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import save_file

from support.resident import status_bytes
from support.tiny_llama import TinyLlama
from tpengine.checkpoint.loader import load_model
from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine_args import EngineArgs
from tpengine.layers.weights import Weights

LAYERS, HIDDEN, INNER, HEADS, VOCABULARY = 8, 1024, 4096, 16, 8_000
CONFIG = TinyLlama(64, HEADS, HEADS, HIDDEN, INNER, LAYERS, VOCABULARY, 128).config().to_dict()
CONFIG["architectures"] = ["LlamaForCausalLM"]


def write(path: Path, kind: str) -> None:
    """Writes the model with matrices of one type; all blocks are equal."""
    quantum = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quantum]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    hundredth = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    whole_block = np.tile(hundredth, block_bytes)[:block_bytes]

    def matrix(name: str, rows: int, columns: int) -> None:
        data = np.tile(whole_block, (rows, columns // block))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantum)

    matrix("token_embd", VOCABULARY, HIDDEN)
    matrix("output", VOCABULARY, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{i}.{name}", HIDDEN, HIDDEN)
        matrix(f"blk.{i}.ffn_gate", INNER, HIDDEN)
        matrix(f"blk.{i}.ffn_up", INNER, HIDDEN)
        matrix(f"blk.{i}.ffn_down", HIDDEN, INNER)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gptq(folder: Path) -> int:
    """Writes the model in groups of 128, with vocabulary and norms in 16 bits; returns the bytes of
    its tensors."""
    state = {"model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    for name in ("model.embed_tokens", "lm_head"):
        state[f"{name}.weight"] = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        sizes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        sizes |= {f"mlp.{name}_proj": (HIDDEN, INNER) for name in ("gate", "up")}
        for name, (inputs, outputs) in (sizes | {"mlp.down_proj": (INNER, HIDDEN)}).items():
            groups = inputs // 128
            state |= {
                f"{prefix}.{name}.qweight": torch.full((inputs // 8, outputs), 0x12345678).int(),
                f"{prefix}.{name}.qzeros": torch.full((groups, outputs // 8), 0x77777777).int(),
                f"{prefix}.{name}.scales": torch.full((groups, outputs), 0.01).half(),
                f"{prefix}.{name}.g_idx": (torch.arange(inputs) // 128).int(),
            }
    save_file(state, folder / "model.safetensors")
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": scheme}))
    return sum(tensor.nbytes for tensor in state.values())


def measure(model: Path, quantization: str | None = None, load_format: str = "auto") -> list[int]:
    """Returns the peak above the start, and the bytes of the weights."""
    args = EngineArgs(str(model), load_format=load_format, quantization=quantization)
    config = args.create_engine_config("cpu").model
    weights = Weights(
        torch.bfloat16, torch.device("cpu"), ParallelState(), quantization, quantization is None
    )
    fields, is_over = ("RssAnon", "RssShmem"), threading.Event()
    base = peak = status_bytes(*fields)

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, status_bytes(*fields))

    thread = threading.Thread(target=watch)
    thread.start()
    with torch.inference_mode():
        loaded = load_model(config, weights)
    is_over.set()
    thread.join()
    del loaded
    return [peak - base, weights.num_bytes]


def main() -> None:
    folder = Path(sys.argv[1])
    num_values = 2 * VOCABULARY * HIDDEN + LAYERS * HIDDEN * (4 * HIDDEN + 3 * INNER)
    small = {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(CONFIG | small))
    measure(folder, "int4", "dummy")  # imports, and memory that the first call of a kernel takes
    (folder / "gptq").mkdir()
    file_bytes = write_gptq(folder / "gptq")
    print("gptq", *measure(folder / "gptq"), file_bytes)
    gc.collect()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    print("int4", *measure(folder, "int4", "dummy"), num_values // 2 + VOCABULARY * HIDDEN)
    for kind in ("Q4_0", "Q6_K"):
        gc.collect()
        path = folder / f"{kind}.gguf"
        write(path, kind)
        # Q6_K is held in 8 bits.
        file_bytes = path.stat().st_size if kind == "Q4_0" else num_values
        print(kind, *measure(path), file_bytes)


if __name__ == "__main__":
    main()
