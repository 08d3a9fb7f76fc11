"""Logits processors that tests pass by import path, as users do."""

from __future__ import annotations

import torch

seen: list[tuple[list[int], ...]] = []
kept: list[torch.Tensor] = []
NOT_A_FUNCTION = 3


def keep(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Keeps its arguments."""
    kept.append(logits)
    return logits


def forbid_last(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Forbids the previous token; edits in place, and changes the list that it was given."""
    if output_ids:
        logits[output_ids[-1]] = -torch.inf
    output_ids.append(0)
    return logits


def forbid_prompt(
    prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """Forbids the prompt's tokens; returns a new tensor."""
    seen.append((prompt_ids, output_ids))
    return logits.index_fill(0, torch.tensor(prompt_ids), -torch.inf)


def fail_at_third(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Raises after two tokens."""
    if len(output_ids) == 2:
        raise KeyError("the third token")
    return logits


def exit_process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Tries to end the process."""
    raise SystemExit(3)


def forget_to_return(output_ids: list[int], logits: torch.Tensor) -> None:
    """Returns None, a common mistake."""
    logits[0] = 0.0


def cut_off(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Returns one logit too few."""
    return logits[1:]


def make_nan(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Returns NaN, as after a division by zero."""
    return logits * torch.nan


def forbid_all(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Bans every token."""
    return torch.full_like(logits, -torch.inf)


def one_argument(logits: torch.Tensor) -> torch.Tensor:
    """Cannot be called with ids."""
    return logits


def make_sparse(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of another layout."""
    return logits.to_sparse()


def lose_data(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without data."""
    return logits.to("meta")


def quantize(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose numbers are no logits."""
    return torch.quantize_per_tensor(logits, 0.1, 0, torch.qint8)
