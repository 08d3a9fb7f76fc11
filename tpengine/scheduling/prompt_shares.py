"""How prompts divide a step that cannot hold all that they have to compute.

Each running sequence that has computed its prompt gets its one token. Of what is left, the first
prompt that runs gets at least half: whatever comes while it is computed, it needs at most twice the
steps. The other half goes first to waiting requests that come before it in the policy's order: it
began earlier only because it was shorter. Then it goes to shorter prompts, the one with the least
left to compute first. Those that wait begin in this step if slots and blocks are free. A prompt
does not begin before others have computed blocks that it would find in the prefix cache. What these
do not need goes to all prompts in their order, so a step is as full as without them.

A prompt gives way to none of a lower priority, and with fair shares only to those of its own owner:
the counters say when the others have their turn. A waiting prompt that begins leaves slots and
blocks for the first waiting request, if that has room; else it passes by the rule of `passing.py`.

Without chunked prefill a prompt is computed whole, and these rules do not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from tpengine.config import SchedulerConfig
from tpengine.scheduling.hopeless_requests import why_never
from tpengine.scheduling.passing import MAX_LOOKED
from tpengine.scheduling.queues import RequestQueues
from tpengine.scheduling.sequence import Request
from tpengine.scheduling.step import StepBuilder

Part = tuple[Request, int]
"""(request, tokens that it has to compute)"""


class PromptShares:
    """Divides the steps of one scheduler.

    Args:
        start: lets a waiting request run, and adds its row.
    """

    def __init__(
        self,
        queues: RequestQueues,
        config: SchedulerConfig,
        start: Callable[[Request, StepBuilder], None],
    ) -> None:
        self._queues, self._config, self._start = queues, config, start

    def divide(self, first: Request, num_left: int, step: StepBuilder) -> None:
        """Notes in `step` how many tokens it may hold of each prompt, and starts waiting ones.

        Args:
            first: the running request that continues now, with `num_left` tokens to compute.
        """
        rows = {sequence.seq_id for sequence, _ in step.sized_rows()}
        others = {
            request: self._num_behind(request)
            for request in self._queues.running
            if request is not first and not any(s.seq_id in rows for s in request.sequences)
        }
        prompts = {r: num for r, num in others.items() if num > len(r.running_sequences)}
        num_decodes = sum(others.values()) - sum(prompts.values())
        # Half of the step is for prompts even if all the rest decodes.
        left = max(step.tokens_left - num_decodes, step.tokens_left - step.tokens_left // 2)
        prompts = {first: num_left, **prompts}
        lacking = sum(map(self._queues.blocks.num_lacking_blocks, [first, *others]))
        left -= self._give_half(prompts, left // 2, lacking, step)
        # What remains goes to all prompts in their order.
        for request, num in prompts.items():
            more = min(num - step.parts[request], left)
            step.parts[request] += more
            left -= more

    def _give_half(
        self, prompts: dict[Request, int], half: int, lacking: int, step: StepBuilder
    ) -> int:
        """Gives up to `half` tokens: first to requests that come before the first prompt, then to
        shorter ones, running or waiting. Returns how many they take.

        Args:
            prompts: those that run, each with its tokens to compute; the first one first.
            lacking: blocks that running requests still need.
        """
        queues, rank = self._queues, self._queues.waiting.rank
        (first, num_left), *others = prompts.items()
        computing, num_given = list(prompts), 0
        candidates = [*others, *self._waiting(first, step)]
        candidates.sort(key=lambda part: (rank(part[0]) > rank(first), part[1]))
        for request, num in candidates:
            if num_given == half:
                break
            waits = not queues.is_running(request)
            if waits:
                num = max(0, num - queues.blocks.num_cached_tokens(request))
            # One that comes before the first prompt need not be shorter.
            is_shorter = num < num_left and self._gives_way(first, request)
            if not is_shorter and rank(request) > rank(first):
                continue
            if waits and not self._may_begin(request, computing, lacking, step.step_input.step):
                continue
            step.parts[request] = min(num, half - num_given)
            num_given += step.parts[request]
            if waits:
                computing.append(request)
                step.owed.append(request)
                self._start(request, step)
        return num_given

    def _num_behind(self, request: Request) -> int:
        """Tokens that a running request has to compute, and can; before its fork, only the common
        ones."""
        num_common = self._queues.unforked.get(request.request_id)
        if num_common is not None:
            num = num_common - request.unfinished_sequences[0].num_computed_tokens
        else:
            num = sum(sequence.num_behind for sequence in request.running_sequences)
        return self._queues.pictures.num_ready(request, num)

    def _waiting(self, first: Request, step: StepBuilder) -> list[Part]:
        """The waiting requests that may begin in a step; with fair shares those of one owner."""
        queues, shares = self._queues, self._queues.shares
        if step.lacks_blocks or queues.swapped or not queues.slots.num_free:
            return []
        waiting = queues.waiting if shares is None else shares.account(first).waiting
        looked = islice(waiting, MAX_LOOKED)
        return [
            (request, queues.pictures.num_ready(request, request.num_common_tokens))
            for request in looked
        ]

    def _gives_way(self, first: Request, other: Request) -> bool:
        """Whether a prompt may get less because of another one."""
        shares = self._queues.shares
        is_own = shares is None or shares.account(other) is shares.account(first)
        return is_own and other.priority <= first.priority

    def _may_begin(
        self, request: Request, computing: Iterable[Request], lacking: int, number: int
    ) -> bool:
        """Whether there is room for a waiting request beside the first one and beside the `lacking`
        blocks of running ones, and the `computing` prompts compute nothing for it."""
        queues, blocks, head = self._queues, self._queues.blocks, self._queues.waiting.head()
        num_slots = len(request.unfinished_sequences)
        num_blocks = lacking + blocks.num_missing_blocks(request)
        keeps_room = head is not request and queues.has_room(head)
        if keeps_room:
            num_slots += len(head.unfinished_sequences)
            num_blocks += blocks.num_missing_blocks(head) + blocks.num_free_blocks
        return (
            num_slots <= queues.slots.num_free
            and not request.num_unread_tokens  # its step holds all of them
            and num_blocks <= 0
            and (keeps_room or head is request or queues.may_pass(request, number))
            and queues.adapters.has_room(request, queues.running)
            and why_never(request, self._config, blocks) is None
            and not blocks.is_coming(request, computing)
        )
