"""Makes the stubs from `tpengine.proto`: `python tests/support/build_proto.py [FOLDER]`.

The stubs are committed, so that users need no compiler; a test compares them with a fresh build.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

from tpengine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROTO = "tpengine/proto/tpengine.proto"
"""Path from the folder of the package; reflection lists the file under this name."""


def build(target: Path) -> None:
    """Writes the stubs below `target`, in the folders of the package.

    Raises:
        ConfigError: the compiler rejects the file.
    """
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            str(ROOT / PROTO),
        ]
    )
    if code != 0:
        raise ConfigError(f"protoc rejects {PROTO}: exit code {code}; see its output above")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
