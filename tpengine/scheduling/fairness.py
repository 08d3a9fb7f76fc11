"""Fair shares among the owners of requests: the virtual token counter of arXiv 2401.00588.

Every account, the requests of one owner, has a counter. It grows by the prompt tokens computed for
the account and by twice its output tokens, divided by its weight. Tokens computed again after a
preemption or a loss cost nothing. The account with the lowest counter comes first:

    waiting: its first request, in the policy's order, is the next to start, before prompts of other
        accounts continue. Each step leaves a token for every sequence that decodes.
    running: its requests take their tokens and blocks first. The account with the highest counter
        is preempted first.
    slots, blocks and swap space: if its first request has no room, and would leave the account
        within its share of slots and blocks (or nothing of the account runs), it takes the room
        from accounts that hold more than their share; each of these keeps at least one request.
        Blocks that requests share through the prefix cache count for none of them.
        Beside other accounts, one may swap out to its share of the host blocks.

A share is the account's weight divided by the weights of all accounts with unfinished requests. An
account that has been idle starts at the lowest counter of those, so what it did not use is lost. So
the counters of two accounts that always have waiting requests differ by at most about what the KV
cache holds.

The accounts of which nothing has begun stand in a sorted list, so that a step looks only at those
of which something runs, and at the first of the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from heapq import merge

from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.policy import Rank, SchedulingPolicy
from tpengine.scheduling.sequence import Request
from tpengine.scheduling.sequence import Sequence as TokenSequence

PROMPT_COST, OUTPUT_COST = 1, 2
_MAX_IDLE = 1024
"""Accounts without requests that are remembered, because they are ahead of others."""
_MAX_LABELS = 64
_OTHERS = "others"


@dataclass(slots=True, eq=False)
class Account:
    """What one owner has here, and what it was given.

    Attributes:
        label: of its metrics.
        weight: of the owner's latest request; 0 without an unfinished one.
        waiting: its waiting requests.
        counter: cost of its tokens, divided by the weight.
        rank: the counter at the beginning of the step, or when its first request began in the step.
        num_requests: unfinished ones.
    """

    label: str
    weight: float
    waiting: SchedulingPolicy
    counter: float
    rank: float = 0.0
    num_requests: int = 0

    @property
    def num_begun(self) -> int:
        """Unfinished requests that do not wait for their turn."""
        return self.num_requests - len(self.waiting)


@dataclass(frozen=True, slots=True)
class OwnerStats:
    """The requests of one owner at a moment, and its tokens since the start.

    Attributes:
        num_running: requests that have begun, swapped ones too.
        num_tokens: prompt tokens computed and output tokens.
    """

    num_waiting: int
    num_running: int
    num_tokens: int


class FairShares:
    """A policy that orders owners by their counters, and the requests of each by another policy.

    Args:
        make_policy: makes the policy within an account.
        num_slots: slots for sequences, which accounts share.
    """

    def __init__(self, make_policy: Callable[[], SchedulingPolicy], num_slots: int) -> None:
        self._make_policy, self._num_slots = make_policy, num_slots
        self._order = make_policy()  # it gives ranks, and holds no request
        self._accounts: dict[str, Account] = {}  # by name, those with unfinished requests
        self._begun: set[Account] = set()
        self._others: list[Account] = []  # of which nothing has begun, by `_place`
        self._idle: dict[str, Account] = {}
        # Of the accounts with unfinished requests. Exact: sums of floats would drift over the days.
        self._total_weight = Fraction()
        self._num_waiting = 0
        self._floor = 0.0
        self._num_charged: dict[str, int] = {}  # prompt tokens, by request id
        self._served: Counter[str] = Counter()  # tokens, by label

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, those of the lowest counter first."""
        begun = sorted((account for account in self._begun if account.waiting), key=self._place)
        for account in merge(begun, self._others, key=self._place):
            yield from account.waiting

    def rank(self, request: Request) -> Rank:
        """The counter of its owner at the beginning of the step, then the policy's rank."""
        return self.account(request).rank, *self._order.rank(request)

    def add(self, request: Request) -> None:
        """Adds a request to those of its owner."""
        with self._changing(self.account(request)) as account:
            account.waiting.add(request)
        self._num_waiting += 1

    def head(self) -> Request:
        """The next request of the account with the lowest counter."""
        begun = [account for account in self._begun if account.waiting]
        return min(begun + self._others[:1], key=self._place).waiting.head()

    def remove(self, request: Request) -> None:
        """Removes a waiting request."""
        with self._changing(self.account(request)) as account:
            account.waiting.remove(request)
        self._num_waiting -= 1

    def account(self, request: Request) -> Account:
        """The account of an unfinished request."""
        return self._accounts[request.owner.account]

    def enter(self, request: Request) -> None:
        """Counts a request that has just arrived, before it is added."""
        owner, lowest = request.owner, self._lowest()
        if owner.account not in self._accounts:
            account = self._idle.pop(owner.account, None) or self._open(owner.account)
            account.counter = max(account.counter, lowest)
            self._accounts[owner.account] = account
        with self._changing(self._accounts[owner.account]) as account:
            account.num_requests += 1
        self._total_weight += Fraction(owner.weight) - Fraction(account.weight)
        account.weight = owner.weight

    def leave(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._num_charged.pop(request.request_id, None)
        name = request.owner.account
        with self._changing(self.account(request)) as account:
            account.num_requests -= 1
        if account.num_requests:
            return
        del self._accounts[name]
        self._total_weight -= Fraction(account.weight)
        account.weight = 0.0
        self._floor = self._lowest() if self._accounts else account.counter
        self._idle[name] = account
        if len(self._idle) > _MAX_IDLE:  # what is not ahead of others loses nothing by this
            ahead = sorted(self._idle.items(), key=lambda item: item[1].counter)
            self._idle = dict(ahead[_MAX_IDLE // 2 :])

    def begin_step(self) -> None:
        """Fixes the ranks until the next step."""
        for account in self._begun:
            account.rank = account.counter

    def charge_prompt(self, request: Request, sequence: TokenSequence, size: int) -> None:
        """Charges the prompt tokens in a row of `size` tokens that are computed the first time, and
        those of an encoder prompt before the first row."""
        end = min(sequence.num_computed_tokens + size, sequence.num_prompt_tokens)
        num_charged = self._num_charged.get(request.request_id, 0)
        num_new = end - max(sequence.num_computed_tokens, num_charged)
        if request.encoder is not None and not num_charged:
            num_new += request.encoder.num_tokens
        if num_new > 0:
            self._num_charged[request.request_id] = end
            self._charge(request, num_new, PROMPT_COST)

    def charge_outputs(
        self, tokens: Iterable[tuple[TokenSequence, int]], request_of: Mapping[int, Request]
    ) -> None:
        """Charges the tokens that a step has given.

        Args:
            tokens: sequences, each with its token.
            request_of: the request of each sequence that runs, by the sequence's id.
        """
        for sequence, _ in tokens:
            if (request := request_of.get(sequence.seq_id)) is not None:
                self._charge(request, 1, OUTPUT_COST)

    def is_owed(self, first: Request, others: Iterable[Request]) -> bool:
        """Whether all others have owners that were given as much as that of a request, or more."""
        own = self.account(first)
        accounts = map(self.account, others)
        return all(other is not own and own.counter <= other.counter for other in accounts)

    def choose_victims(
        self, first: Request, running: Sequence[Request], num_free: int, blocks: BlockManager
    ) -> list[Request]:
        """Running requests whose room is due to a waiting one, which has none; empty: no room is.

        Args:
            running: in order of rank.
            num_free: slots that no sequence has.
        """
        victims: list[Request] = []
        if len(self._accounts) == 1:
            return victims
        # Slots and blocks that are the share of an account of weight 1.
        rooms = self._num_slots, blocks.num_total_blocks
        limits = [float(room / self._total_weight) for room in rooms]
        own, holdings = self.account(first), self._holdings(running, blocks)
        need = len(first.unfinished_sequences), blocks.num_needed_blocks(first)
        held = [number + more for number, more in zip(holdings[own], need, strict=True)]
        if any(holdings[own]) and _exceeds(own, held, limits):
            return []
        lacking = [need[0] - num_free, blocks.num_missing_blocks(first)]
        num_left = Counter(map(self.account, running))
        for request in reversed(running):
            if max(lacking) <= 0:
                return victims
            account = self.account(request)
            if account is own or num_left[account] < 2:
                continue
            if _exceeds(account, holdings[account], limits):
                victims.append(request)
                num_left[account] -= 1
                for at, number in enumerate(_held(request, blocks)):
                    holdings[account][at] -= number
                    lacking[at] -= number
        return victims if max(lacking) <= 0 else []

    def may_swap(self, victim: Request, swapped: Sequence[Request], blocks: BlockManager) -> bool:
        """Whether a request may take host blocks beside the swapped ones of its owner."""
        account = self.account(victim)
        share = float(blocks.host.num_blocks / self._total_weight) * account.weight
        own = [request for request in swapped if self.account(request) is account]
        num_held = sum(map(blocks.num_host_blocks, own)) + blocks.num_held_blocks(victim)
        return len(self._accounts) == 1 or num_held <= share

    def stats(self) -> dict[str, OwnerStats]:
        """The requests and tokens of each owner, by label; any thread may ask."""
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for account in tuple(self._accounts.values()):
            num_waiting = len(account.waiting)
            waiting[account.label] += num_waiting
            running[account.label] += max(0, account.num_requests - num_waiting)
        served = self._served.copy()
        items = served.items()
        return {label: OwnerStats(waiting[label], running[label], count) for label, count in items}

    def are_right(self, unfinished: Iterable[Request]) -> bool:
        """Whether the accounts count these requests, and no others."""
        counted, accounts = Counter(map(self.account, unfinished)), set(self._accounts.values())
        return (
            self._num_waiting == sum(len(account.waiting) for account in accounts)
            and all(account.num_requests == counted[account] for account in accounts)
            and self._begun == {account for account in accounts if account.num_begun}
            and self._others == sorted(accounts - self._begun, key=self._place)
            and self._total_weight == sum(Fraction(account.weight) for account in accounts)
        )

    def _place(self, account: Account) -> tuple[float, int, Rank]:
        """Of equal counters, the account comes first that has begun fewer requests."""
        return account.counter, account.num_begun, self._order.rank(account.waiting.head())

    @contextmanager
    def _changing(self, account: Account) -> Iterator[Account]:
        """Takes an account out of the order while its requests change."""
        if account in self._begun:
            self._begun.remove(account)
        elif account.num_requests:
            del self._others[bisect_left(self._others, self._place(account), key=self._place)]
            account.rank = account.counter
        yield account
        if account.num_begun:
            self._begun.add(account)
        elif account.num_requests:
            insort(self._others, account, key=self._place)

    def _open(self, name: str) -> Account:
        label = name if name in self._served or len(self._served) < _MAX_LABELS else _OTHERS
        self._served[label] += 0
        return Account(label, 0.0, self._make_policy(), 0.0)

    def _charge(self, request: Request, num_tokens: int, cost: int) -> None:
        account = self.account(request)
        account.counter += cost * num_tokens / account.weight
        self._served[account.label] += num_tokens

    def _lowest(self) -> float:
        """The lowest counter of the accounts with requests; without any, what it was last."""
        counters = [account.counter for account in (*self._begun, *self._others[:1])]
        return min(counters, default=self._floor)

    def _holdings(
        self, running: Sequence[Request], blocks: BlockManager
    ) -> dict[Account, list[int]]:
        """Slots that each account holds, and blocks that one request of it holds alone."""
        holdings: dict[Account, list[int]] = defaultdict(lambda: [0, 0])
        for request in running:
            for at, number in enumerate(_held(request, blocks)):
                holdings[self.account(request)][at] += number
        return holdings


def _exceeds(account: Account, held: Sequence[int], limits: Sequence[float]) -> bool:
    """Whether one of these numbers is more than an account's share of room."""
    return any(number > account.weight * limit for number, limit in zip(held, limits, strict=True))


def _held(request: Request, blocks: BlockManager) -> tuple[int, int]:
    """Slots of a running request, and blocks that no other holds: what its preemption frees."""
    return len(request.unfinished_sequences), blocks.num_own_blocks(request)
