"""Rules about tokens by slot; and sampling never reads from the device: it runs on torch's meta
device, which has no numbers.

On a GPU a read waits for all work that was launched before. So does a copy from ordinary host
memory, of an index for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import logits_processors
from support.costs import cost_ratio
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpengine.layers.sampler import noise_keys, sample
from tpengine.messages import NewSequence, SamplingRules
from tpengine.worker.prompt_logprobs import PromptRow, compute_prompt_logprobs
from tpengine.worker.sampling_state import SamplingSlots
from tpengine.worker.token_rules import BadWords

META = torch.device("meta")
VOCAB_SIZE = 31
KINDS = [
    SamplingRules(temperature=0.0),
    SamplingRules(temperature=0.0, logprobs=3, bad_words_token_ids=[[4], [1, 5]]),
    SamplingRules(top_k=5, top_p=0.9, logit_bias={3: 1.0}, repetition_penalty=1.3),
    SamplingRules(presence_penalty=0.5, allowed_token_ids=[7, 8, 9], min_tokens=9, logprobs=0),
    SamplingRules(logits_processors=["support.logits_processors:keep"]),
]
_UPLOADS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class OneDevice(TorchDispatchMode):
    """Fails if an op gets tensors of the host together with those of the device, except uploads."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors if tensor.ndim}
        assert func in _UPLOADS or len(kinds) < 2, f"{func} gets tensors of host and device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("processed", [False, True])
def test_samples_with_all_that_can_be_asked(processed: bool) -> None:
    slots = SamplingSlots(8, META, processed)
    token_ids = np.zeros((8, 40), np.int32)
    rows = np.arange(len(KINDS))
    with OneDevice():
        for slot, params in enumerate(KINDS):
            # Two are beams, of which one asks for ranks.
            count = {2: 4, 3: 6}.get(slot, 0)
            new = NewSequence(slot, [1, 2, 3], 2, 0, [], params, slot, 0, [2], count)
            slots.write(slot, new, noise_keys(slot, 0))
        for position in range(3, 23):
            positions = np.full(len(KINDS), position, np.int32)
            batch = slots.gather(rows, positions, token_ids)
            assert batch.edits is not None
            sampled = sample(torch.empty(len(KINDS), VOCAB_SIZE, device=META), batch)
            slots.edits.append(rows, np.full(len(KINDS), position), token_ids, positions)
        logits_processors.kept.clear()
    shapes = [list(tensor.shape) for tensor in sampled.findings.tensors]
    chosen_and_lost = [[5], [5], [5]]
    logprobs = [[2], [2], [2, 3], [2, 3]]
    beams = [[2, 6], [2, 6], [2, 6], [6]]
    assert shapes == [*chosen_and_lost, *logprobs, *beams]
    assert all(tensor.device == META for tensor in sampled.findings.tensors)


def test_log_probabilities_of_prompts() -> None:
    rows = [PromptRow(0, 0, 1, np.arange(7), 3), PromptRow(2, 9, 5, np.arange(2), 0)]
    with OneDevice():
        pending = compute_prompt_logprobs(
            torch.empty(12, 4, device=META),
            rows,
            lambda hidden: torch.empty(len(hidden), VOCAB_SIZE, device=META),
            5,
        )
    assert [list(x.shape) for x in pending.tensors[3::4]] == [[5, 3], [2, 3], [2, 0]]


IDS = st.integers(254, 257)  # on both sides of a byte's end


@settings(max_examples=500, deadline=None)
@given(st.lists(st.lists(IDS, min_size=2, max_size=5), min_size=1), st.lists(IDS, max_size=12))
def test_bad_words_are_found_by_what_stands_before_their_ends(
    words: list[list[int]], text: list[int]
) -> None:
    bad = BadWords(words)
    for end in range(len(text) + 1):
        banned = bad.banned_after(np.array(text[:end], np.int32))
        expected = {
            w[-1] for w in words if len(w) <= end + 1 and text[:end][1 - len(w) :] == w[:-1]
        }
        assert (set() if banned is None else set(banned.tolist())) == expected


def test_bad_words_of_many_lengths_cost_little() -> None:
    """To compare those of each of 1,023 lengths would cost hundreds of times those of one."""
    text = np.full(1000, 7, np.int32)
    text[500] = 8
    several = BadWords([[*length * [7], 9] for length in range(1, 1024)])
    single = BadWords([[7, 9]])

    def search(words: BadWords) -> None:
        for end in range(1, len(text) + 1):
            assert (words.banned_after(text[:end]) is None) == (end == 501)

    assert cost_ratio(lambda: search(several), lambda: search(single)) < 40
