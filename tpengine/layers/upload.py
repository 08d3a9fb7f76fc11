"""Small arrays of the host on their way to the device, without a wait for either."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on CPU the array itself.

    From pinned memory, which torch keeps until the copy is done: from any other a copy waits until
    the device has finished all that was launched before, a whole step of the model perhaps.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
