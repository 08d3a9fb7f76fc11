"""Opens mutations of a GGUF file as an engine does, in a process whose memory is limited.

`python -m support.gguf_fuzz FILE FOLDER COUNT` prints how many were refused. Any error that is not
one of the two typed ones ends it.
"""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path

from support.mutations import mutated
from support.subjects import load
from tpengine import EngineArgs
from tpengine.checkpoint.model_files import read_generation_config
from tpengine.engine.tokenizer import load_tokenizer
from tpengine.errors import ConfigError, ModelLoadError

LIMIT_BYTES = 1 << 30
_HEADER_BYTES = 6000


def open_as_engine(path: Path, max_model_len: int | None) -> None:
    args = EngineArgs(str(path), max_model_len=max_model_len, dtype="float32", device="cpu")
    load_tokenizer(args.create_engine_config("cpu").model)
    read_generation_config(str(path))
    load(path, max_model_len=max_model_len)


def main(file: str, folder: str, count: str) -> None:
    open_as_engine(Path(file), None)  # imports everything before the limit is set
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
    data, rng, path, refused = Path(file).read_bytes(), random.Random(0), Path(folder) / "f.gguf", 0
    for i in range(int(count)):
        path.unlink(missing_ok=True)  # a new inode: the old one may still be mapped
        path.write_bytes(mutated(data, rng, _HEADER_BYTES))
        try:
            open_as_engine(path, rng.choice((64, 64, None)))
        except (ModelLoadError, ConfigError):
            refused += 1
        except BaseException:
            print(f"mutation {i}", file=sys.stderr)
            raise
    print(refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
