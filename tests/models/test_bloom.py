"""Slopes of linear biases against transformers' formula."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from tpengine.models.bloom import alibi_slopes


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 14, 16, 20, 31, 112])
def test_alibi_slopes_equal_those_of_transformers(num_heads: int) -> None:
    # transformers gives slope times position, of which position 1 is the slope
    bias = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), num_heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), bias[:, 0, 1])
