"""What Ray holds for a driver that is an actor or a task of Ray is free when it has ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from recovery.on_ray.processes import actors
from support.waiting import PATIENCE_S, wait_until

from executor.ray_engines import free_cpus, ray_engine
from tpengine import SamplingParams
from tpengine.executor.launch.placement import Placer

NUM_TOKENS = 8


class Driver:
    """Places two ranks, or makes an engine of two; and ends by itself."""

    def place(self, check: Callable[[], None] = lambda: None) -> None:
        Placer({"CPU": 1.0}, 2, "PACK", 600.0, lambda _: set(), check).place(set())

    def cancel(self) -> None:
        """Stops to place them while the group's owner starts, or waits for room."""

        def check() -> None:
            raise KeyError("cancelled")

        with pytest.raises(KeyError, match="cancelled"):
            self.place(check)

    def generate(self, folder: str) -> list[int]:
        self.engine = engine = ray_engine(folder, 2)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.add_request("one", None, params, prompt_token_ids=[5, 6, 7])
        outputs = []
        while engine.has_unfinished_requests():
            outputs = engine.step() or outputs
        return list(outputs[0].outputs[0].token_ids)

    def exit(self) -> None:
        os._exit(1)


def place_and_exit() -> None:
    Driver().place()
    os._exit(1)


def groups() -> set[str]:
    """The groups of engines that have room, or wait for it."""
    table = ray.util.placement_group_table().values()
    living = [group["name"] for group in table if group["state"] != "REMOVED"]
    return {name for name in living if name.startswith("tpengine-")}


@pytest.mark.parametrize("way", ["killed", "exit", "restarted", "waiting", "cancelled", "task"])
def test_its_group_ends_with_it(ray_address: str, way: str) -> None:
    """Also if no rank lives that could remove it; and so does the actor that owns the group."""
    before, running = groups(), actors().keys()
    others = ray.util.placement_group([{"CPU": 7 if way in ("waiting", "cancelled") else 1}])
    assert others.wait(PATIENCE_S)
    options = {"num_cpus": 0, "max_restarts": int(way == "restarted")}
    driver = ray.remote(Driver).options(**options).remote()
    try:
        if way == "cancelled":
            ray.get(driver.cancel.remote(), timeout=PATIENCE_S)
        elif way == "task":
            placed = ray.remote(place_and_exit).options(max_retries=0).remote()
            ray.wait([placed], timeout=PATIENCE_S)
        else:
            placed = driver.place.remote()
            wait_until(lambda: len(groups() - before) == 1)
        if way in ("exit", "restarted"):
            ray.get(placed, timeout=PATIENCE_S)
            driver.exit.remote()
        elif way in ("killed", "waiting"):
            ray.kill(driver)
        wait_until(lambda: groups() == before)
    finally:
        ray.kill(driver)
        ray.util.remove_placement_group(others)
    wait_until(lambda: actors().keys() <= running)
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"])


def test_an_engine_that_is_made_again(folder: Path) -> None:
    """In another actor, on a cluster that has room for one engine only."""
    others = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"] - 2}])
    assert others.wait(PATIENCE_S)
    answers: list[Any] = []
    try:
        for end in (ray.kill, lambda driver: driver.exit.remote()):
            driver = ray.remote(Driver).options(num_cpus=0).remote()
            answers.append(ray.get(driver.generate.remote(str(folder)), timeout=PATIENCE_S))
            end(driver)
        assert answers[0] == answers[1]
        wait_until(lambda: free_cpus() == 2)
    finally:
        ray.util.remove_placement_group(others)
