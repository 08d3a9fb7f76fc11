"""Logits processors that tests name by import path, as users name theirs."""

from __future__ import annotations

import torch

seen: list[tuple[list[int], ...]] = []
kept: list[torch.Tensor] = []
NOT_A_FUNCTION = 3


def keep(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Keeps what it is given."""
    kept.append(logits)
    return logits


def forbid_last(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Never the same token twice running; edits in place, and spoils the list it was given."""
    if output_ids:
        logits[output_ids[-1]] = -torch.inf
    output_ids.append(0)
    return logits


def forbid_prompt(
    prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """No token of the prompt; a new tensor."""
    seen.append((prompt_ids, output_ids))
    return logits.index_fill(0, torch.tensor(prompt_ids), -torch.inf)


def fail_at_third(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Raises once two tokens are there."""
    if len(output_ids) == 2:
        raise KeyError("the third token")
    return logits


def exit_process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Tries to end the process."""
    raise SystemExit(3)


def forget_to_return(output_ids: list[int], logits: torch.Tensor) -> None:
    """A frequent slip."""
    logits[0] = 0.0


def cut_off(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Loses a logit."""
    return logits[1:]


def make_nan(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """What a division by zero brings."""
    return logits * torch.nan


def forbid_all(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Leaves nothing to sample."""
    return torch.full_like(logits, -torch.inf)


def one_argument(logits: torch.Tensor) -> torch.Tensor:
    """Cannot be called with ids."""
    return logits
