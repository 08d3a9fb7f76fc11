"""All that crosses from the driver to a worker and back: plain data, no torch.

A worker keeps the running batch in fixed slots between steps, so the driver sends deltas: a new
sequence in full, a known one by its slot and how many of its tokens to compute. A preempted
sequence gives its slot up and comes back in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tpengine.sampling_params import SamplingParams


@dataclass(slots=True)
class NewSequence:
    """A sequence that enters the worker's batch, with everything the worker needs of it."""

    slot: int
    token_ids: list[int]
    """Prompt and output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    index: int
    """Index of the sequence in its request; noise is keyed by (seed, index, position)."""
    end_token_ids: list[int]
    """Ids that cannot be sampled before `min_tokens`; empty when `min_tokens` is 0."""


@dataclass(slots=True)
class StepInput:
    """One step, from the scheduler to every rank.

    Rows are the scheduled sequences: first those with one token to compute, then longer chunks.
    The worker applies, in this order: `freed_slots`, `new_sequences`, `new_block_ids`,
    `token_overrides`; then computes all rows and samples.

    Attributes:
        step: number of the step, counting from 1.
        slots: slot of each row.
        num_scheduled_tokens: tokens to compute of each row, at least 1.
        new_sequences: those that are not in the worker's batch yet.
        new_block_ids: (slot, blocks appended to its table).
        freed_slots: slots whose sequence finished or was preempted.
        token_overrides: (slot, token id): the driver's word for the last token of a sequence.
        sample_rows: rows whose last position is sampled; one row may serve several sequences.
        sample_slots: for each of `sample_rows`, the slot that the sampled token is appended to.
    """

    step: int
    slots: list[int]
    num_scheduled_tokens: list[int]
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_block_ids: list[tuple[int, list[int]]] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    token_overrides: list[tuple[int, int]] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    sample_slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one sampled position: the chosen token's, and the likeliest ones."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepOutput:
    """Rank 0's answer: what was sampled, in the order of `StepInput.sample_slots`.

    Attributes:
        logprobs: by place in `token_ids`, for those that asked.
        model_s: seconds inside the model: forward, logits and sampling.
    """

    step: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    model_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Where one rank's memory goes, in bytes."""

    rank: int
    device: str
    total_bytes: int
    weights_bytes: int
    activation_peak_bytes: int
    kv_budget_bytes: int
    """What may be spent on the KV cache."""
    block_bytes: int
    """One block of all layers, K and V."""
    num_device_blocks: int
