"""With this folder on PYTHONPATH every Python has the fake card, and benchmarks of few numbers."""

import sys
from pathlib import Path

_tests = str(Path(__file__).resolve().parents[3])
sys.path[:0] = [_tests, str(Path(_tests).parent)]

from support import fake_card  # noqa: E402

fake_card.install()
fake_card.shrink()
