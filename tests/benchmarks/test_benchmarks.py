"""The measurements of our own parts and of other engines run, small, and say on what they ran."""

from __future__ import annotations

import re

import pytest
from support import third_party
from support.models import ModelShop
from support.zoo import PLAIN

from benchmarks.__main__ import main

ENGINE = ["--dtype", "float32", "--device", "cpu", "--cpu-kv-cache-space", "0.02"]


@pytest.mark.soak
def test_transformers_serves_alike(models: ModelShop, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(models.folder(PLAIN)), "--num-requests", "2", "--runs", "1", *ENGINE]
    assert main(["peers", *options]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^output tokens/s +[\d.]+ ", shown), shown
    rate = r"(?m)^transformers +[\d.]+ output tokens/s .*; tpengine does [\d.]+ x that$"
    assert re.search(rate, shown), shown


def test_an_engine_that_cannot_be_installed_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(third_party, "vllm_python", lambda: pytest.skip("no wheel"))
    engines = ["--engines", "vllm:bf16,tpengine:int8"]
    cases = ["--cases", "decode:2,prefill:1x40", "--output-tokens", "4", "--runs", "2"]
    assert main(["engines", "--models", "embedded", *engines, *cases]) == 0
    shown = capsys.readouterr().out
    assert "NOT MEASURED: vllm:bf16 is not here: no wheel" in shown
    for case in ("decode:2", "prefill:1x40"):
        assert re.search(rf"(?m)^embedded {case}, tokens/s\ntpengine:int8 +[\d.]+ ", shown), shown
