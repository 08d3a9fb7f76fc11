"""pytest plugin of the rehearsal: a few cases of each test, without those that a fake card cannot
pass."""

from __future__ import annotations

from collections import Counter

import pytest

CASES = 2
IMPOSSIBLE = {
    "test_wrong_use_says_what_to_do": "the compiled launchers check the arguments",
    "test_packed_weights_refuse_wrong_use": "the compiled launchers check the arguments",
    "test_a_row_of_packed_weights_does_not_depend_on_the_others": "torch's products depend on it",
    "test_every_op_of_the_gpu_path_has_a_kernel": "the compiled library registers them",
    "test_a_world_of_one": "NCCL needs a GPU",
    "test_a_graph_holds_exchanges": "NCCL needs a GPU",
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        is_kept = seen[name] <= CASES and name.rpartition("::")[2] not in IMPOSSIBLE
        (kept if is_kept else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
