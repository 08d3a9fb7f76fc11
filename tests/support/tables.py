"""What is data and no code: the files of `tests/data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data"


def read_table(name: str) -> Any:
    """The content of `NAME.json`."""
    return json.loads((FOLDER / f"{name}.json").read_text())
