"""The distribution that sampling has to follow, and how well counts of draws fit it."""

from __future__ import annotations

from typing import Any

import torch


def exact_probabilities(logprobs: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """float64 `[vocab_size]` by the textbook: sort, cut, renormalise."""
    probabilities = torch.softmax(logprobs.double() / fields["temperature"], dim=-1)
    values, order = probabilities.sort(descending=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    keep[fields.get("top_k", len(values)) :] = False
    values = values * keep / (values * keep).sum()
    keep &= values.cumsum(0) - values < fields.get("top_p", 1.0)
    keep &= values >= fields.get("min_p", 0.0) * values[0]
    values = values * keep / (values * keep).sum()
    return torch.zeros_like(probabilities).scatter(0, order, values)


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's chi-square; tokens expected fewer than 5 times share one bin."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed_bins = counts[~rare].double()
    expected_bins = expected[~rare]
    if float(expected[rare].sum()) >= 5:
        observed_bins = torch.cat([observed_bins, counts[rare].sum(dim=0, keepdim=True).double()])
        expected_bins = torch.cat([expected_bins, expected[rare].sum(dim=0, keepdim=True)])
    statistic = ((observed_bins - expected_bins) ** 2 / expected_bins).sum()
    freedom = torch.tensor((len(expected_bins) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
