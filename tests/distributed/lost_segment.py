"""Makes the file of a segment in a folder, and is killed: `python lost_segment.py FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tpengine.distributed.shared_memory import SegmentFile

SegmentFile("engine", 0, 2, 4096, Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
