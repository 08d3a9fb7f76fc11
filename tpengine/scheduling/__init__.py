"""Decides which requests run in the next step, and in which cache blocks. It uses no tensors.

Where to look:
    scheduler: what a step holds, admission, preemption, refusals; applies an answered step.
    queues: where every request stands; the one place that takes slots and blocks back.
    block_manager: which blocks a sequence holds: allocate, fork, copy on write, swap, free.
    block_pool: reference counts, eviction, and blocks found again by their content.
    policy: the order of requests.
    step: the data of a step; which sequences of a request it takes.
"""
