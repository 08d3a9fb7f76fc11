"""What the kernels and a decode step should take on a card, from its measured copy bandwidth alone,
so that cards of different speed are held against the same model. The constants are guesses made
before anything had run on a card; a time that is far from its prediction is looked at first.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.10
_STREAM_SHARE = 0.94
"""Of the copy bandwidth: a kernel that reads each byte once."""
_START_S = 3.5e-6
"""Launch, length, page number and first bytes: latencies that follow each other."""
_SPLIT_S = 2.5e-6
"""The second kernel, which adds the parts of a split context up."""
_SMALL_S = {False: 1.95e-6, True: 2.5e-6}
"""A kernel of few bytes within a graph, for few rows and for many."""
_LINEAR_SHARE = {False: 0.90, True: 0.85}
"""Of the copy bandwidth: weights read by the library's products, for few rows and for many."""
_HEAD_S = {False: 0.06e-3, True: 0.10e-3}
"""Logits beyond their weights, sampling, ids to the host."""
_GAP_S = {False: 0.05e-3, True: 0.15e-3}
"""Between one step's graph and the next."""
_SMALL_KERNELS = 4
"""A layer: two norms, rotary with cache write, gated activation."""
_MANY_ROWS = 16


def decode_s(num_bytes: float, copy: float, is_split: bool) -> float:
    """Seconds of decode attention over K and V of that many bytes.

    Args:
        copy: measured bandwidth from device to device, bytes read and written per second.
        is_split: some context is cut into parts.
    """
    return num_bytes / (_STREAM_SHARE * copy) + _START_S + is_split * _SPLIT_S


def small_s(num_bytes: float, copy: float, rows: int) -> float:
    """Seconds of an elementwise kernel in a graph."""
    return num_bytes / (_STREAM_SHARE * copy) + _SMALL_S[rows > _MANY_ROWS]


def linear_s(weight_bytes: float, copy: float, rows: int) -> float:
    """Seconds of a matrix product with so few rows that reading the weights is all of it."""
    return weight_bytes / (_LINEAR_SHARE[rows > _MANY_ROWS] * copy)


@dataclass(frozen=True)
class DecodeStep:
    """A step in which every sequence decodes.

    Attributes:
        weight_bytes: read in a step.
        kv_bytes: of one layer, of all sequences.
    """

    weight_bytes: float
    kv_bytes: float
    num_layers: int
    batch_size: int

    def seconds(self, copy: float) -> float:
        """With graphs, and started before the ids of the step before have come."""
        many = self.batch_size > _MANY_ROWS
        layer_s = decode_s(self.kv_bytes, copy, True) + _SMALL_KERNELS * _SMALL_S[many]
        linears_s = linear_s(self.weight_bytes, copy, self.batch_size)
        return linears_s + self.num_layers * layer_s + _HEAD_S[many] + _GAP_S[many]


def compare(measured_s: float, predicted_s: float) -> str:
    """The prediction, and how far what was measured is from it; marked where that is far."""
    off = measured_s / predicted_s - 1
    unit, factor = ("ms", 1e3) if predicted_s >= 1e-3 else ("us", 1e6)
    mark = "" if abs(off) <= TOLERANCE else "  !! slower" if off > 0 else "  !! faster"
    return f"predicted {factor * predicted_s:7.2f} {unit} {100 * off:+7.1f} %{mark}"
