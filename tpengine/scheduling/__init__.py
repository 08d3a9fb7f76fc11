"""Who runs next, and in which cache blocks. Pure Python: no tensor, no device."""

from tpengine.scheduling.allocation import AllocStatus
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.policy import POLICIES, FirstComeFirstServed, Priority, SchedulingPolicy
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.step import SchedulerOutput

__all__ = [
    "POLICIES",
    "AllocStatus",
    "BlockManager",
    "FirstComeFirstServed",
    "Priority",
    "Scheduler",
    "SchedulerOutput",
    "SchedulingPolicy",
]
