"""Models for engines of several projects: a folder of safetensors and GGUF files of the same
weights, written once into `.cache/peers`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support import llama_cpp_tools, third_party
from support.programs import run_program

from benchmarks.common import write_weights
from tpengine.bench.harness import SHAPES, shape_folder
from tpengine.config import EMBEDDED_MODEL
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError

CACHE = third_party.CACHE.parent / "peers"
EMBEDDED, SMOLLM2 = "embedded", "smollm2"
_SCRIPT = str(llama_cpp_tools.__file__)
_MAX_POSITIONS = 8192
_PATIENCE_S = 600


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        name: a shape of `tpengine bench` with random weights, `embedded`, the model that tpengine
            carries, or `smollm2`, whose weights are those of a GGUF file of the type Q4_1.
    """

    name: str

    def __post_init__(self) -> None:
        known = [*SHAPES, EMBEDDED, SMOLLM2]
        if self.name not in known:
            raise ConfigError(f"--model must be one of {', '.join(known)}; got {self.name!r}")

    @property
    def folder(self) -> Path:
        """The folder of the files that are written."""
        return CACHE / self.name

    def whole(self) -> Path:
        """The model in 16 bits, in the form that has its tokenizer: a folder of safetensors, or
        the GGUF file `BF16`."""
        if self.name == SMOLLM2:
            return self.gguf("BF16")
        if self.name == EMBEDDED:
            return Path(EMBEDDED_MODEL)
        if not (self.folder / "model.safetensors").exists():
            with shape_folder(self.name, _MAX_POSITIONS) as folder:
                config = json.loads((Path(folder) / "config.json").read_text())
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
            write_weights(EngineArgs(str(self.folder), dtype="bfloat16"), self.folder)
        return self.folder

    def gguf(self, kind: str) -> Path:
        """The weights as a GGUF file of a type, by llama.cpp's converter and quantizer. `stored`:
        the file that the model came in."""
        if kind == "stored" and self.name == SMOLLM2:
            return third_party.smollm2()
        if kind not in llama_cpp_tools.FILE_TYPES:
            raise ConfigError(f"{self.name} has no GGUF file of the type {kind!r}")
        path = self.folder / f"{kind}.gguf"
        if path.exists():
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        if kind == "BF16" and self.name != SMOLLM2:
            convert = [sys.executable, _SCRIPT, "convert", third_party.converter()]
            options = {"timeout": _PATIENCE_S, "env": {"PYTHONPATH": third_party.gguf_packages()}}
            run_program(*convert, self.whole(), path, "bf16", **options)
            return path
        source_file = self.gguf("stored" if kind == "BF16" else "BF16")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            link = Path(folder) / "source.gguf"  # the quantizer writes beside it
            link.symlink_to(source_file)
            quantize = [third_party.llama_cpp_python(), _SCRIPT, "quantize"]
            run_program(*quantize, link, kind, timeout=_PATIENCE_S, env={"PYTHONPATH": ""})
            link.with_name(path.name).rename(path)
        return path
