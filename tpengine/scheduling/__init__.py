"""Who runs next, and in which cache blocks. Pure Python: no tensor, no device."""

from tpengine.scheduling.block_manager import AllocStatus, BlockManager
from tpengine.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.step import SchedulerOutput

__all__ = [
    "AllocStatus",
    "BlockManager",
    "FirstComeFirstServed",
    "Scheduler",
    "SchedulerOutput",
    "SchedulingPolicy",
]
