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
    num_candidates: int = 0
    """Candidates to report at each of its samples, for beam search; 0: none."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A slot that becomes a copy of another, up to the index of its sequence and thus its noise.

    What stood in `child_slot` before is gone.
    """

    parent_slot: int
    child_slot: int
    index: int


@dataclass(slots=True)
class BlockMoves:
    """Blocks whose content goes elsewhere before a step computes anything, in this order.

    Attributes:
        swap_outs: (device block, host block).
        swap_ins: (host block, device block); never beside swap-outs.
        copies: (device block, device block), copy-on-write; no target is a source.
    """

    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_outs or self.swap_ins or self.copies)


@dataclass(slots=True)
class StepInput:
    """One step, from the scheduler to every rank.

    Rows are the scheduled sequences: first those with one token to compute, then longer chunks.
    The worker applies, in this order: `freed_slots`, `new_sequences`, `forks`, `new_block_ids`,
    `replaced_block_ids`, `token_overrides` and `block_moves`; then computes all rows and samples.

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
            A slot that was forked in this step from the row's has then computed what that has.
        forks: slots that become copies of others.
        replaced_block_ids: (slot, place in its table, block): its own copy of a shared block.
        block_moves: contents to be copied.
        next_slots: those of `sample_slots` that the next step will probably go on with, one token
            each and nothing else beside them. Each has a place in its blocks for that token. A
            worker whose device works by itself may begin with them at once; what the next step
            changes of a slot, or leaves out, is then dropped.
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
    forks: list[Fork] = field(default_factory=list)
    replaced_block_ids: list[tuple[int, int, int]] = field(default_factory=list)
    block_moves: BlockMoves = field(default_factory=BlockMoves)
    next_slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one sampled position: the chosen token's, and the likeliest ones."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class Candidates:
    """Tokens that a beam may go on with, best first.

    Attributes:
        scores: log probabilities after bias, bans and penalties, which is what beams are ranked
            by; minus infinity for a banned token.
        logprobs: those of the raw logits.
        ranks: by the raw logits among the whole vocabulary, from 1; empty where no log
            probabilities were asked for.
    """

    token_ids: list[int]
    scores: list[float]
    logprobs: list[float]
    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens, each given those before it.

    Attributes:
        first_position: of the token that `entries[0]` speaks of, in the prompt; at least 1.
    """

    first_position: int
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class StepOutput:
    """Rank 0's answer: what was sampled, in the order of `StepInput.sample_slots`.

    Attributes:
        logprobs: by place in `token_ids`, for those that asked.
        model_s: seconds inside the model: forward, logits and sampling; since the answer before
            where the device was busy with this step all the while.
        candidates: by place in `token_ids`, for sequences with `num_candidates`.
        prompt_logprobs: by row of the step, for prompts whose request asked.
        errors: by place in `token_ids`: why that token could not be chosen; the id there means
            nothing, and the request cannot go on.
    """

    step: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    model_s: float = 0.0
    candidates: dict[int, Candidates] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


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
    num_host_blocks: int = 0
    """Blocks that the host memory for swapping holds."""
    communicator_bytes: int = 0
    """What connects the ranks: this rank's part of their segment of shared memory, or what NCCL
    took of the device."""
    held_by_others_bytes: int = 0
    """What other processes, other ranks among them, held of the device when blocks were
    counted."""
    logits_bytes: int = 0
    """Of the activations' peak, what logits, log probabilities and sampling add to the model's; on
    GPUs."""
    graphs_bytes: int = 0
    """What recorded decode steps take: CUDA graphs, or a `DecodeRecording`'s tensors."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and for how long the ranks of a group look for each other; the same for all of them.

    Attributes:
        engine_id: unique to the engine among all on the machines.
        epoch: counts the groups that this engine has had.
        addresses: IP address of each rank's node, in rank order.
        port: of rank 0's store, at its address, as `Worker.open_rendezvous` returned it.
        connect_timeout_s: for all ranks to arrive.
        collective_timeout_s: for any one exchange; a peer that is later counts as lost.
    """

    engine_id: str
    epoch: int
    addresses: list[str]
    port: int
    connect_timeout_s: float = 30.0
    collective_timeout_s: float = 30.0
