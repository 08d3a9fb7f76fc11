"""Log-mel features of a sound, as Whisper's models read them.

The loudness of frequencies from 0 to 8 kHz, in bands that are as wide as the ear hears them, in
windows of 25 ms of which one begins every 10 ms. As in transformers' `WhisperFeatureExtractor`, but
for rounding.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from tpengine.config import FRAME_SAMPLES, FRAME_STEP, SAMPLING_RATE

_LOWEST_POWER = 1e-10
_MOST_DECADES = 8.0
"""By which a number may lie below the largest one of the sound."""
_BORDER_HZ = 1000.0
_BORDER_MEL = 15.0
"""Up to here the scale is linear."""
_LOG_STEP = math.log(6.4) / 27.0
Floats = npt.NDArray[np.float32]


def log_mel(samples: Floats, num_mel_bins: int, num_frames: int) -> Floats:
    """Returns the features of the frames that the sound is in, and of one more, if there is room:
    it is silence, as are all frames up to `num_frames`.

    Args:
        samples: float32 `[num_samples]`, at most `num_frames * FRAME_STEP`.

    Returns:
        float32 `[num_sent, num_mel_bins]`.
    """
    half = FRAME_SAMPLES // 2
    num_sent = min(num_frames, (len(samples) + half) // FRAME_STEP + 2)
    # Before the sound and behind the last frame it is continued by its own mirror image.
    whole = np.zeros(num_frames * FRAME_STEP, np.float32)
    whole[: len(samples)] = samples
    whole = np.pad(whole, half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(whole, FRAME_SAMPLES)[::FRAME_STEP][:num_sent]
    angles = 2 * np.pi * np.arange(FRAME_SAMPLES) / FRAME_SAMPLES
    window = (0.5 - 0.5 * np.cos(angles)).astype(np.float32)
    powers = np.square(np.abs(np.fft.rfft(frames * window))).astype(np.float32)
    logs = np.log10(np.maximum(powers @ _mel_filters(num_mel_bins), _LOWEST_POWER))
    floored: Floats = np.maximum(logs, logs.max() - np.float32(_MOST_DECADES))
    return (floored + np.float32(4.0)) / np.float32(4.0)


@functools.cache
def _mel_filters(num_mel_bins: int) -> Floats:
    """Returns the share of each frequency in each band, float32 `[num_frequencies, num_mel_bins]`:
    triangles of the same area over neighbouring points of Slaney's mel scale."""
    frequencies = np.linspace(0, SAMPLING_RATE / 2, FRAME_SAMPLES // 2 + 1)
    mel_per_hz = _BORDER_MEL / _BORDER_HZ
    top = _BORDER_MEL + math.log(SAMPLING_RATE / 2 / _BORDER_HZ) / _LOG_STEP
    mels = np.linspace(0, top, num_mel_bins + 2)
    above = _BORDER_HZ * np.exp(_LOG_STEP * (mels - _BORDER_MEL))
    points = np.where(mels < _BORDER_MEL, mels / mel_per_hz, above)
    low, centre, high = points[:-2], points[1:-1], points[2:]
    rising = (frequencies[:, None] - low) / (centre - low)
    falling = (high - frequencies[:, None]) / (high - centre)
    shares: Floats = np.maximum(0.0, np.minimum(rising, falling)) * 2 / (high - low)
    return shares.astype(np.float32)
