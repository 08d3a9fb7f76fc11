"""The sound of a prompt, for models whose encoder reads sound: samples, or a file."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpengine.config import SAMPLING_RATE, EncoderConfig, SoundConfig
from tpengine.engine.log_mel import Floats, log_mel
from tpengine.errors import InvalidPromptError

_RATES = range(1000, 768_001)
"""Sampling rates that are accepted, in Hz."""
_LARGEST = 2.0**15
"""Amplitude above which a sound is refused: powers of its spectrum must fit in float32."""
_MOST_BYTES_OF_A_SAMPLE = 4
_Samples = npt.NDArray[np.floating[Any]]
_Reader = Callable[[int], _Samples]
"""Returns the next samples of a file, at most so many: the mean of all channels."""


def read_features(prompt: Any, sound: SoundConfig) -> bytes:
    """Computes what the encoder reads of its prompt; see `CrossInput.features`.

    Raises:
        InvalidPromptError: the prompt has no sound, has text too, or the sound cannot be used.
    """
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not isinstance(data, Mapping) or data.keys() != {"audio"}:
        text = "the encoder of the model reads sound, and the prompt has none"
        raise InvalidPromptError(f'{text}; give multi_modal_data, {{"audio": (samples, 16000)}}')
    if any(prompt[name] for name in prompt.keys() - {"multi_modal_data"}):
        text = "the encoder reads sound alone, and its prompt has something else too"
        raise InvalidPromptError(f"{text}; put text and ids into decoder_prompt")
    samples = read_samples(data["audio"], sound.longest_s)
    return log_mel(samples, sound.num_mel_bins, sound.num_frames).tobytes()


def begin(encoder: EncoderConfig, language: str | None, task: str) -> list[int]:
    """Returns how the decoder's prompt begins.

    Args:
        language: a key of `SoundConfig.languages`; None: the usual one.
        task: transcribe or translate.

    Raises:
        InvalidPromptError: the model does not know the language or the task.
    """
    sound, token_ids = encoder.sound, list(encoder.start_token_ids)
    assert sound is not None, "the caller asks models of sound only"
    for name, value, table, usual in (
        ("language", language, sound.languages, "en"),
        ("task", task, sound.tasks, "transcribe"),
    ):
        if value is None or (not table and value == usual):
            continue
        if value not in table:
            known = ", ".join(sorted(table)[:120]) or usual
            raise InvalidPromptError.of_field(name, f"= {value[:40]!r} must be one of {known}")
        own = table[value]
        token_ids = [own if token_id in table.values() else token_id for token_id in token_ids]
    return token_ids


def read_samples(audio: Any, most_s: float) -> Floats:
    """Returns the samples of a sound at `SAMPLING_RATE`, float32 `[num_samples]`.

    Args:
        audio: (samples, sampling rate in Hz), or the bytes or the path of a file.
        most_s: longest sound, in seconds.

    Raises:
        InvalidPromptError: it is something else, cannot be decoded, or is longer.
    """
    if isinstance(audio, list) and len(audio) == 1:
        (audio,) = audio
    if isinstance(audio, str | PathLike):
        try:
            audio = Path(audio).read_bytes()
        except OSError as error:
            raise _wrong(f"cannot be read: {error}; give the path of a file") from error
    if isinstance(audio, bytes | bytearray | memoryview):
        read, rate = _open(bytes(audio), most_s)
        samples = read(int(most_s * rate) + 1)
    elif isinstance(audio, Sequence) and len(audio) == 2:
        samples, rate = _checked_samples(audio[0]), _as_int(audio[1])
    else:
        hint = f"give (samples, {SAMPLING_RATE}), or the bytes or the path of a file"
        raise _wrong(f"holds no sound with its sampling rate: {type(audio).__name__}; {hint}")
    _check_length(len(samples), rate, most_s)
    return _convert(samples, rate)


def read_parts(content: bytes, part_s: float, most_s: float) -> Iterator[Floats]:
    """Yields the sound of a file in parts, each as of `read_samples`. A part ends where the sound
    is quietest in the last sixth of `part_s`, so that few words are cut.

    Args:
        content: of the file.
        part_s: longest part, in seconds.
        most_s: longest sound, in seconds.

    Raises:
        InvalidPromptError: it cannot be decoded, or is longer.
    """
    read, rate = _open(content, most_s)
    longest = int(part_s * rate)
    held = read(longest + 1)
    while len(held) > longest:
        end = _quietest_place(held[:longest])
        yield _convert(held[:end], rate)
        held = np.concatenate([held[end:], read(end)])
    _check_length(len(held), rate, part_s)
    yield _convert(held, rate)


def _quietest_place(samples: _Samples) -> int:
    """Returns the middle of the quietest of 50 windows at the end of a part, each one 300th of it;
    of a part of few samples there are fewer windows. At least 1."""
    window = max(1, len(samples) // 300)
    num_windows = min(50, len(samples) // window)
    start = len(samples) - num_windows * window
    powers = np.square(samples[start:]).reshape(num_windows, window).sum(axis=1)
    return max(1, start + int(powers.argmin()) * window + window // 2)


def _convert(samples: _Samples, rate: int) -> Floats:
    if not (np.abs(samples) <= _LARGEST).all():  # nor is it so for NaN
        text = f"holds samples that are not within [-{_LARGEST:g}, {_LARGEST:g}]"
        raise _wrong(f"{text}, or are NaN; give floats in [-1, 1]")
    if rate == SAMPLING_RATE:
        return samples.astype(np.float32)
    # By its spectrum, of which the part above half the new rate is lost.
    count = max(1, round(len(samples) * SAMPLING_RATE / rate))
    spectrum = np.fft.rfft(samples.astype(np.float64))[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)


def _checked_samples(samples: Any) -> _Samples:
    try:
        array = np.asarray(samples)
    except Exception as error:  # objects raise anything while they become an array
        raise _wrong(f"holds samples that are no array: {error}; give floats") from error
    if array.dtype.kind != "f" or array.ndim != 1:
        text = f"holds samples of dtype {array.dtype} and shape {list(array.shape)}"
        raise _wrong(f"{text}; give floats in [-1, 1] of one channel, [num_samples]")
    return array


def _as_int(rate: Any) -> int:
    try:
        return index(rate)
    except TypeError:
        text = f"has the sampling rate {rate!r:.40}; give Hz, an integer such as {SAMPLING_RATE}"
        raise _wrong(text) from None


def _check_length(num_samples: int, rate: int, most_s: float) -> None:
    if rate not in _RATES:
        known = f"at least {_RATES.start} and less than {_RATES.stop} Hz, such as {SAMPLING_RATE}"
        raise _wrong(f"has the sampling rate {rate}; it must be {known}")
    if not num_samples:
        raise _wrong("holds no samples; give a sound that is not empty")
    if num_samples > most_s * rate:
        length = f"lasts {num_samples / rate:.4g} s, longer than the {most_s:g} s"
        raise _wrong(f"{length} that are read at once; cut it into parts")


def _open(content: bytes, most_s: float) -> tuple[_Reader, int]:
    """Returns what reads a file, and its sampling rate."""
    if not content:
        raise _wrong("is an empty file; send a sound")
    try:
        file = wave.open(io.BytesIO(content))  # noqa: SIM115, as it stays open for the reader
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        if width > _MOST_BYTES_OF_A_SAMPLE:
            raise wave.Error(f"samples of {width} bytes")
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a part is too long
        return _open_other(content, most_s, error)
    # Writers that do not know the number at the start declare too many.
    _check_length(min(file.getnframes(), len(content) // (width * channels)), rate, most_s)

    def read(num_frames: int) -> _Samples:
        frames = file.readframes(min(num_frames, file.getnframes() - file.tell()))
        raw = np.frombuffer(frames, np.uint8, len(frames) // (width * channels) * width * channels)
        if width == 1:
            raw = np.bitwise_xor(raw, np.uint8(0x80))  # they alone are unsigned
        wide = np.zeros((len(raw) // width, _MOST_BYTES_OF_A_SAMPLE), np.uint8)
        wide[:, -width:] = raw.reshape(-1, width)
        return np.asarray(wide.view("<i4").reshape(-1, channels).mean(axis=1) / 2**31)

    return read, rate


def _open_other(content: bytes, most_s: float, why_no_wave: Exception) -> tuple[_Reader, int]:
    """Opens what Python itself cannot read, if there is a library for it."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the library that it loads is not there
        why = str(why_no_wave) or "it is cut off or damaged"  # as of EOFError
        text = f"is no WAV file with integers ({why}), and soundfile, which reads FLAC, MP3"
        raise _wrong(f"{text} and OGG, is not installed; send WAV, or install it") from None

    def checked(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            why = getattr(error, "error_string", error)
            text = f"is no sound that can be decoded: {why}; send WAV, FLAC, MP3 or OGG"
            raise _wrong(text) from error

    file = checked(lambda: soundfile.SoundFile(io.BytesIO(content)))
    _check_length(file.frames, file.samplerate, most_s)

    def read(num_frames: int) -> _Samples:
        frames = checked(lambda: file.read(num_frames, dtype="float32", always_2d=True))
        return np.asarray(frames.mean(axis=1))

    return read, file.samplerate


def _wrong(problem: str) -> InvalidPromptError:
    return InvalidPromptError.of_field("audio", problem)
