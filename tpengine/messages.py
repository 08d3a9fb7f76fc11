"""Messages between the driver and a worker: plain data, no torch.

A worker keeps the running batch in fixed slots between steps, so the driver sends only changes: a
new sequence in full, a known one by its slot and the number of its tokens to compute. A preempted
sequence loses its slot and comes back in full.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpengine.sampling_params import LogitsProcessor


@dataclass(slots=True)
class SamplingRules:
    """How ranks choose the tokens of one request.

    The driver makes it when the request is added: fields have the name and the value of the field
    of `SamplingParams`, except those with another form, which say so.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """With the ids of `bad_words`."""
    logprobs: int | None = None
    """The size of the vocabulary if all are asked for."""
    prompt_logprobs: int | None = None
    """The same."""
    logits_processors: list[LogitsProcessor | str | bytes] | None = None
    """Functions are pickled if they leave the driver's process."""
    grammar: str | None = None
    """Of `structured_outputs`: see `structured.constraints.to_grammar`."""
    not_first_token_ids: list[int] = field(default_factory=list)
    """Ids that no output begins with."""

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is set, so that logits depend on earlier tokens."""
        neutral = (0.0, 0.0, 1.0)
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != neutral


@dataclass(slots=True)
class NewSequence:
    """A sequence that enters the worker's batch, with all that the worker needs of it."""

    slot: int
    token_ids: list[int]
    """Prompt and output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    rules: SamplingRules
    seed: int
    index: int
    """Index of the sequence in its request; its noise is a function of (seed, index, position)."""
    end_token_ids: list[int]
    """Ids that are not sampled before `min_tokens`; empty when `min_tokens` is 0."""
    num_candidates: int = 0
    """Number of candidates to report at each of its samples, for beam search; 0: no candidates."""
    adapter_slot: int | None = None
    """Slot of its adapter; None: it has none."""
    pictures: list[PictureSpan] = field(default_factory=list)
    """Where its prompt has pictures, in the order of their positions."""
    start_of_second: int | None = None
    """The position at which the second text of a pair begins; None: its prompt is one text."""
    cross: CrossInput | None = None
    """None: the model has one half."""


@dataclass(slots=True)
class CrossInput:
    """What the decoder of a model with two halves attends to beside its own tokens.

    Attributes:
        num_tokens: of the encoder prompt.
        block_ids: blocks for K and V of these tokens, in each layer of the decoder.
        token_ids: the encoder reads them before the step's rows are computed, and fills the blocks;
            empty: the blocks are filled.
        features: of a sound, which is read in the place of the ids: float32 `[num_sent,
            num_mel_bins]`; later frames are silence and equal the last one. Empty: ids are read.
    """

    num_tokens: int
    block_ids: list[int]
    token_ids: list[int]
    features: bytes = b""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Consecutive tokens of a prompt that stand for a picture, or for a part of one.

    Attributes:
        start: position of the first token.
        first_row: the row of the picture's features that this token gets; the others follow.
        num_columns: tokens that stand for places beside each other; more stand below them.
        digest: of the picture.
    """

    start: int
    num_tokens: int
    first_row: int
    num_columns: int
    digest: bytes

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class PictureLoad:
    """A picture of which rank 0 computes the features. All ranks of the first stage keep them.

    Attributes:
        num_rows: rows of the features; each belongs to a token.
        pixels: uint8 `[height, width, 3]`, RGB; empty in what other ranks than the first get.
    """

    digest: bytes
    num_rows: int
    height: int
    width: int
    pixels: bytes


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter that each rank loads into a slot, in place of the one before.

    Attributes:
        key: `AdapterFolder.key`, which the rank's files must have too.
        path: of its folder.
    """

    slot: int
    key: bytes
    path: str


@dataclass(frozen=True, slots=True)
class Fork:
    """A slot that becomes a copy of another, but with its own sequence index and so its own noise.

    The old content of `child_slot` is overwritten.
    """

    parent_slot: int
    child_slot: int
    index: int


@dataclass(slots=True)
class BlockMoves:
    """Blocks that are copied before a step computes anything, in the order of the attributes.

    Attributes:
        swap_outs: (device block, host block).
        swap_ins: (host block, device block); a step with swap-outs has no swap-ins.
        copies: (source, target) device blocks, for copy-on-write; no target is a source.
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
    The worker applies, in this order, `adapter_loads`, `computed_pictures`, `dropped_pictures`,
    `picture_loads`, `freed_slots`, `new_sequences`, `forks`, `new_block_ids`, `replaced_block_ids`,
    `token_overrides` and `block_moves`; then it computes all rows and samples. The driver may send
    a step before it has the answer of the one before: then a row begins with a token that the
    worker has sampled and the driver does not know.

    A draft is a token that may follow the last one of a sequence. It is computed, and sampled, in a
    row of its own behind the sequence's row, so that `slots` names the slot once more. A draft is
    right if it equals the token sampled in the row before it. A row's sample counts if its draft
    and all drafts before it are right. Example, slot 7 with two drafts, slot 2 without: `slots` is
    7 7 7 2.

    Attributes:
        step: number of the step, counting from 1.
        slots: slot of each row.
        num_scheduled_tokens: number of tokens to compute of each row, at least 1.
        new_sequences: sequences that are not in the worker's batch yet.
        new_block_ids: (slot, blocks appended to its table).
        freed_slots: slots whose sequence finished or was preempted.
        token_overrides: (slot, token id): replaces the last token of the sequence in the slot.
        sample_rows: rows whose last position is sampled; one row may serve more than one sequence.
        sample_slots: for each of `sample_rows`, the slot that the sampled token is appended to: the
            row's own, or one that this step forks from it.
        forks: slots that become copies of others.
        replaced_block_ids: (slot, index in its table, block): its own copy of a shared block.
        block_moves: blocks to copy.
        adapter_loads: adapters that come into slots which no running sequence uses.
        drafts: (slot, the sequence's drafts).
        dropped_pictures: digests of pictures whose features have to make place, could not be
            computed, or are waited for by no request any more.
        picture_loads: pictures whose features later steps need.
        computed_pictures: digests of pictures whose features the first rank has computed, by the
            answers since the last message; the other ranks of its stage get them.
        num_awaited_rows: rows of features that were asked for and of which no answer has told; the
            first rank computes a part of them before the step's rows. There may be no rows.
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
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    dropped_pictures: list[bytes] = field(default_factory=list)
    picture_loads: list[PictureLoad] = field(default_factory=list)
    computed_pictures: list[bytes] = field(default_factory=list)
    num_awaited_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed, those of encoders included."""
        return sum(self.num_scheduled_tokens) + self.num_encoder_tokens

    @property
    def num_encoder_tokens(self) -> int:
        """Number of tokens that an encoder reads before the rows."""
        return sum(len(new.cross.token_ids) for new in self.new_sequences if new.cross is not None)


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at a position: of the token that stands there and of the most likely ones.

    They are of the raw logits, or of the processed ones, as `ModelConfig.logprobs_mode` says.
    """

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class Candidates:
    """Tokens that may continue a beam, best first.

    Attributes:
        scores: log probabilities after bias, bans and penalties; beams are ranked by them; minus
            infinity for a banned token.
        logprobs: see `TokenLogprobs`.
        ranks: rank in the whole vocabulary by `logprobs`, from 1; empty unless the request asks
            for log probabilities.
    """

    token_ids: list[int]
    scores: list[float]
    logprobs: list[float]
    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens, each given those before it.

    Attributes:
        first_position: position in the prompt of the token of `entries[0]`; at least 1.
    """

    first_position: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class RowError:
    """Why no token of a row could be sampled.

    Attributes:
        field: the sampling parameter at fault; None: not the caller's.
    """

    text: str
    field: str | None = None


@dataclass(slots=True)
class StepOutput:
    """The answer of the rank that samples, in the order of `StepInput.sample_slots`; of the first
    rank of another stage only `load_results` count.

    Attributes:
        logprobs: by index in `token_ids`, for requests that ask for them, and for those
            whose value the sampling kernel cannot give.
        model_s: seconds inside the model: vision tower, forward, logits and sampling; measured from
            the answer before if the device began with this step earlier.
        waited_s: seconds between the end of the work before and this step's message, in a rank in a
            process of its own.
        candidates: by index in `token_ids`, for sequences with `num_candidates`.
        prompt_logprobs: by row of the step, for requests that ask for them.
        errors: by index in `token_ids`: the token could not be sampled, so that its id has no
            meaning, and the request cannot go on.
        pooled: by index in `token_ids`, what the model gives for a prompt in the place of a token,
            whose id then has no meaning: float32 `[num_outputs]`, as bytes.
        chosen_logprobs: float32, log probability of each of `token_ids`; valid where `logprobs` has
            none. An array, since making a list of it costs more than sending it.
        load_results: by its key, why an adapter could not be loaded by all ranks; by its digest,
            why the features of a picture could not be computed; None: they are computed.
        rejected: indexes in `token_ids` of what was sampled after a wrong draft: it does not count.
        forced: by index in `token_ids`, tokens that follow because the sequence's grammar allows no
            other text.
        behind: slots whose sequences the draft model must still read, so that it guessed nothing.
    """

    step: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    model_s: float = 0.0
    waited_s: float = 0.0
    candidates: dict[int, Candidates] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
    load_results: dict[bytes, str | None] = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)
    forced: dict[int, list[int]] = field(default_factory=dict)
    behind: list[int] = field(default_factory=list)
    pooled: dict[int, bytes] = field(default_factory=dict)
    chosen_logprobs: array[float] = field(default_factory=lambda: array("f"))


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """What one rank's memory is used for, in bytes."""

    rank: int
    device: str
    total_bytes: int
    weights_bytes: int
    activation_peak_bytes: int
    kv_budget_bytes: int
    """Budget of the KV cache."""
    block_bytes: int
    """Size of one block of all layers, K and V."""
    num_device_blocks: int
    num_host_blocks: int = 0
    """Number of blocks in the host memory for swapping."""
    communicator_bytes: int = 0
    """Memory for the exchange between ranks: this rank's part of their segment of shared memory, or
    NCCL's memory on the device."""
    held_by_others_bytes: int = 0
    """Memory of the device that other processes, other ranks included, held when blocks were
    counted."""
    logits_bytes: int = 0
    """Part of the activations' peak that logits, log probabilities and sampling add, on GPUs."""
    graphs_bytes: int = 0
    """Memory of recorded decode steps: CUDA graphs, or the tensors of a `DecodeRecording`."""
    looked_up_bytes: int = 0
    """Part of the weights that a step does not read, but for single rows: the embedding, unless it
    is the output head too, and rotary angles."""
    weights_form: str = ""
    """See `Weights.form`."""
    adapters_bytes: int = 0
    """Part of the weights: the slots of LoRA adapters."""
    draft_block_bytes: int = 0
    """Part of a block that the draft model has, which blocks in the host memory lack."""
    stage: str = ""
    """Stage and layers of a rank of a pipeline; empty: it has all layers."""
    outlives: bool = False
    """Whether weights and KV cache are still there after the rank's process has ended."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a decode step reads; of all experts, if there are experts."""
        return self.weights_bytes - self.looked_up_bytes

    def uses(self, num_blocks: int) -> dict[str, int]:
        """Bytes by use.

        Args:
            num_blocks: of the cache, which on most ranks are fewer than the budget allows.
        """
        return {
            "weights": self.weights_bytes,
            "kv_cache": num_blocks * self.block_bytes,
            "activations": self.activation_peak_bytes,
            "graphs": self.graphs_bytes,
            "communicator": self.communicator_bytes,
            "others": self.held_by_others_bytes,
        }


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a group meet, and time limits; the same for all of them.

    Attributes:
        engine_id: unique among all engines on these machines.
        epoch: number of the group, counted over the engine's life.
        addresses: IP address of each rank's node, in rank order.
        port: port of rank 0's store, as `Worker.open_rendezvous` returned it.
        connect_timeout_s: time until all ranks have connected.
        collective_timeout_s: limit of each exchange; a rank that is later counts as lost.
    """

    engine_id: str
    epoch: int
    addresses: list[str]
    port: int
    connect_timeout_s: float = 30.0
    collective_timeout_s: float = 30.0
