"""The next engine of a model maps the weights that one before has packed, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import greedy
from support.models import ModelShop
from support.waiting import wait_until
from support.zoo import PLAIN

from executor.test_kept_memory import FIELDS
from tpengine import EngineArgs, LLMEngine

STAY_S, SHORT_S = (seconds + os.getpid() / 1e8 for seconds in (300, 1))
"""They tell the holders of these tests from others."""
RANKS = {"executor": "processes", "tensor_parallel_size": 2}


def holders(stay_s: float = STAY_S, program: str = "pgrep") -> bytes:
    """Processes that hold weights for so long; `pkill` ends them."""
    command = [program, "-f", f"weights_holder.* {stay_s} "]
    return subprocess.run(command, capture_output=True, timeout=60).stdout


@pytest.fixture
def serve(models: ModelShop, tmp_path: Path, capfd: Any, caplog: Any) -> Iterator[Any]:
    """Runs an engine; returns its tokens, and whether its ranks have mapped the weights."""
    folder = shutil.copytree(models.folder(PLAIN), tmp_path / "model")

    def run(keep_weights: float = STAY_S, **args: Any) -> tuple[Any, bool]:
        caplog.clear()
        fields = FIELDS | {"executor": "local", "keep_weights": keep_weights} | args
        with LLMEngine.from_engine_args(EngineArgs(str(folder), **fields)) as engine:
            engine.add_request("0", None, greedy(20), prompt_token_ids=[5, 9, 3, 7])
            while engine.has_unfinished_requests():
                outputs = engine.step()
            assert holders(keep_weights)
        said = caplog.text + capfd.readouterr().err
        return outputs[0].outputs[0].token_ids, "weights are read" not in said

    yield run
    holders(program="pkill")


@pytest.mark.parametrize("args", [{}, {"quantization": "int4"}, RANKS], ids=["1", "int4", "2"])
def test_the_next_engine_maps(serve: Any, args: dict[str, Any]) -> None:
    """As long as a holder is there."""
    (tokens, is_mapped), again = serve(**args), serve(**args)
    assert (is_mapped, again) == (False, (tokens, True))
    holders(program="pkill")
    wait_until(lambda: not holders(), what="a holder is left")
    assert serve(**args) == (tokens, False)
    assert serve(SHORT_S, **RANKS)
    wait_until(lambda: not holders(SHORT_S), what="a holder stays")


def test_other_values_are_read(serve: Any, tmp_path: Path) -> None:
    """Also those of a file with the same name, number, size and time."""
    path, (tokens, _) = tmp_path / "model" / "model.safetensors", serve()
    facts, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1_000_000] + content[-2_000_000:-1_000_000])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert serve()[0] != tokens
