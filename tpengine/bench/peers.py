"""Other engines on the same requests, for comparison in one run: transformers' two ways."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from tpengine.bench.workload import Workload
from tpengine.errors import EngineError

_STATIC_BATCH = 16
_BLOCK_TOKENS = 256
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_RESULT_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


class Peer(Protocol):
    """Something that serves a workload."""

    def run(self, workload: Workload) -> float:
        """Serves all requests greedily, ignoring end tokens; returns seconds."""


def load_peer_model(folder: str, dummy: bool, dtype: torch.dtype, device: str) -> Any:
    """transformers' model of `folder`, with random weights if `dummy`, attention by SDPA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if dummy:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):  # billions of random numbers are quicker made there
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval().to(device)


class StaticBatches:
    """`generate` on batches of 16 in the order of arrival, padded on the left; a batch lasts as
    long as its longest request."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload) -> float:
        start = time.perf_counter()
        for first in range(0, len(workload), _STATIC_BATCH):
            self._generate(workload[first : first + _STATIC_BATCH])
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _generate(self, batch: Workload) -> None:
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(num_output for _, num_output in batch)
        device = self._model.device
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )


class ContinuousBatches:
    """transformers' continuous batching, with a cache that holds the whole workload at once."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload) -> float:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        blocks = sum(-(-(len(p) + n) // _BLOCK_TOKENS) + 1 for p, n in workload)
        config = ContinuousBatchingConfig(
            page_size=_BLOCK_TOKENS,
            num_blocks=max(blocks, 16),
            max_batch_tokens=_BATCH_TOKENS[self._model.device.type],
        )
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=max(n for _, n in workload), eos_token_id=-1
        )
        manager_context = self._model.continuous_batching_context_manager(
            generation, timeout=_STOP_TIMEOUT_S, continuous_batching_config=config
        )
        with manager_context as manager:
            start = time.perf_counter()
            for prompt, wanted in workload:
                manager.add_request(prompt, max_new_tokens=wanted, eos_token_id=-1)
            finished = num_output = 0
            while finished < len(workload):
                result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
                if result is None:
                    raise EngineError(
                        f"transformers' continuous batching gave no result for "
                        f"{_RESULT_TIMEOUT_S:.0f} s, {finished} of {len(workload)} were finished"
                    )
                if result.is_finished():
                    finished += 1
                    num_output += len(result.generated_tokens)
            elapsed_s = time.perf_counter() - start
        expected = sum(n for _, n in workload)
        if num_output != expected:
            raise EngineError(
                f"transformers' continuous batching made {num_output} tokens where {expected} "
                "were asked for; the comparison would be of different work"
            )
        return elapsed_s


PEERS = {"hf": StaticBatches, "hf-cb": ContinuousBatches}
"""Names for `--against`."""
