"""Files become pixels in another process, within limits, whatever they hold."""

from __future__ import annotations

import hashlib
import io
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from support.mutations import mutated
from support.picture_files import (
    FORMATS,
    chunk,
    encoded,
    noise,
    png,
    with_checksums,
    with_orientation,
)
from support.programs import running
from support.waiting import PATIENCE_S, wait_until

from tpengine import errors, host
from tpengine.errors import ConfigError, InvalidPictureError, QueueFullError, RequestFailedError
from tpengine.pictures import picture_decoder
from tpengine.pictures.decoder_protocol import ANSWER, Outcome
from tpengine.pictures.picture import PictureLimits, from_image
from tpengine.pictures.picture_decoder import PictureDecoder

PATIENT = PictureLimits(timeout_s=PATIENCE_S, wait_s=PATIENCE_S)
BEYOND = "could not be decoded within the limits of memory and time"
RGB, RGBA = Image.fromarray(noise()), Image.fromarray(noise(num_channels=4))
GREY = Image.fromarray(noise()[..., 0])
SLOW = encoded(Image.new("RGB", (4096, 4096), "red"), "PNG", compress_level=1)
"""It takes some tenths of a second."""
MODES = {
    "grey png": encoded(GREY, "PNG"),
    "bits png": encoded(GREY.convert("1"), "PNG"),
    "grey alpha png": encoded(RGBA.convert("LA"), "PNG"),
    "rgba png": encoded(RGBA, "PNG"),
    "palette png": encoded(RGB.quantize(200), "PNG"),
    "palette alpha png": encoded(RGBA.quantize(200), "PNG", transparency=bytes(range(200))),
    "rgb key png": encoded(RGB, "PNG", transparency=tuple(map(int, noise()[3, 3]))),
    "grey key png": encoded(GREY, "PNG", transparency=int(noise()[3, 3, 0])),
    "interlaced gif": encoded(RGB.quantize(30), "GIF", interlace=1),
    "transparent gif": encoded(RGB.quantize(30), "GIF", transparency=3),
    "two frames gif": encoded(RGB, "GIF", save_all=True, append_images=[GREY]),
    "two frames png": encoded(RGB, "PNG", save_all=True, append_images=[GREY.convert("RGB")]),
    "two frames webp": encoded(RGBA, "WEBP", save_all=True, append_images=[RGB]),
    "lossless webp": encoded(RGBA, "WEBP", lossless=True),
    "grey jpeg": encoded(GREY, "JPEG"),
    "cmyk jpeg": encoded(RGB.convert("CMYK"), "JPEG"),
    "progressive jpeg": encoded(RGB, "JPEG", progressive=True),
    "two frames jpeg": encoded(RGB, "MPO", save_all=True, append_images=[GREY]),
    **{kind: encoded(RGB, kind) for kind in FORMATS},
    **{f"{kind} {i}": with_orientation(i, kind) for kind in FORMATS[:3] for i in range(10)},
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    with closing(PictureDecoder(PATIENT)) as decoder:
        yield decoder


def child(decoder: PictureDecoder) -> psutil.Process:
    return psutil.Process(decoder._process._started.result().pid)


def expected(data: bytes) -> np.ndarray:
    """What Pillow says, without our code: upright, on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return np.asarray(white)


@pytest.mark.parametrize("name", MODES)
def test_pixels_are_those_of_pillow(decoder: PictureDecoder, name: str) -> None:
    picture, data = decoder.decode(MODES[name]), MODES[name]
    assert picture.pixels.shape == expected(data).shape
    np.testing.assert_allclose(picture.pixels.astype(int), expected(data), atol=1)
    assert picture == from_image(Image.open(io.BytesIO(data)))
    size = struct.pack("<II", *picture.pixels.shape[:2])
    assert picture.digest == hashlib.sha256(size + picture.pixels.tobytes()).digest()
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0, 0, 0] = 1


@pytest.mark.parametrize("key", [None, 0x1234])
def test_of_16_bits_the_upper_ones_count(decoder: PictureDecoder, key: int | None) -> None:
    values = np.array([[0, 255, 256, 0x1234, 0x1235, 0xFFFF]], np.uint16)
    options = {} if key is None else {"transparency": key}
    picture = decoder.decode(encoded(Image.fromarray(values), "PNG", **options))
    levels = [0, 0, 1, 0x12 if key is None else 255, 0x12, 255]
    assert picture.pixels.tolist() == [[[level] * 3 for level in levels]]


def test_a_trusted_array_is_copied_and_checked() -> None:
    array = noise()
    picture = from_image(array)
    assert picture == from_image(RGB)
    assert picture != from_image(array.reshape(31, 19, 3))
    array[:] = 0
    assert picture.pixels.any()
    wrong = (noise().astype(float), noise()[..., 0], "a.png", Image.new("F", (2, 2)))
    for image in (*wrong, np.zeros((0, 1, 3), np.uint8)):
        with pytest.raises(InvalidPictureError):
            from_image(image)
    for large in (array, RGB):
        with pytest.raises(InvalidPictureError, match="31 x 19 pixels; send one with 1 to 588 pix"):
            from_image(large, PictureLimits(max_pixels=588))


ZEROS = zlib.compress(bytes(200 << 20))
WEBP_FRAME = struct.pack("<BBBBBBBBBB", 0, 0, 0, 0, 255, 255, 0, 255, 255, 0)
BOMBS = {
    "png": (png(60_000, 60_000, chunk(b"IDAT", ZEROS)), "60000 x 60000 pixels"),
    "gif": (b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + MODES["GIF"][10:], "60000 x 60000"),
    "jpeg": (MODES["JPEG"].replace(b"\x08\0\x13\0\x1f", b"\x08\xff\xff\xff\xff"), "65535 x 65535"),
    "webp": (b"RIFF\xff\xff\0\0WEBPVP8X\x0a\0\0\0" + WEBP_FRAME + bytes(99), "65536 x 65536"),
    "none": (png(0, 9, chunk(b"IDAT", ZEROS)), "PNG file that is damaged|0 x 9 pixels"),
    "text": (png(9, 9, chunk(b"zTXt", b"a\0\0" + ZEROS)), "PNG file that is damaged"),
    "profile": (png(9, 9, chunk(b"iCCP", b"a\0\0" + ZEROS)), "PNG file that is damaged"),
    "cut": (MODES["JPEG"][:-99], "JPEG file that is damaged"),
    "other": (encoded(RGB, "BMP"), "no PNG, JPEG, WebP or GIF"),
    "prefixed": (b" " + MODES["GIF"], "no PNG, JPEG, WebP or GIF"),
    "empty": (b"", "no PNG, JPEG, WebP or GIF"),
    "bytes": (MODES["PNG"] + bytes(20 << 20), "more than 20971520 bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_other_files_are_refused(decoder: PictureDecoder, name: str) -> None:
    data, text = BOMBS[name]
    decoder.decode(MODES["PNG"])
    before = child(decoder)
    with pytest.raises(InvalidPictureError, match=text):
        decoder.decode(data)
    assert errors.status_of(InvalidPictureError).http == 400
    assert child(decoder) == before, "that took a process"


def test_what_follows_the_first_picture_costs_nothing(decoder: PictureDecoder) -> None:
    assert not decoder.decode(png(9, 9, chunk(b"IDAT", ZEROS))).pixels.any()
    frames = [Image.fromarray(noise(4, 4) + i) for i in range(200)]
    many = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoder.decode(many).pixels.shape == (4, 4, 3)
    # An entry of EXIF that points at its own directory, and a million entries that are not there.
    loop = struct.pack("<2sHIHHHIIHHII", b"II", 42, 8, 2, 0x8769, 4, 1, 8, 0x0112, 3, 1, 6)
    for exif in (loop, loop[:8] + b"\xff\xff" + loop[10:], loop[:12]):
        assert decoder.decode(encoded(RGB, "JPEG", exif=b"Exif\0\0" + exif)).pixels.shape[2] == 3


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="greater than 0"):
        PictureLimits(max_pixels=0)


@pytest.mark.parametrize("limit", [{"memory_bytes": 48 << 20}, {"timeout_s": 0.001}])
def test_too_little_memory_or_time_is_one_pictures_loss(limit: dict[str, Any]) -> None:
    with closing(PictureDecoder(replace(PATIENT, **limit))) as decoder:
        with pytest.raises(InvalidPictureError, match=BEYOND):
            decoder.decode(SLOW)
        decoder.limits = PATIENT
        assert decoder.decode(SLOW).pixels[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, None])
def test_a_process_that_dies_in_a_picture_costs_that_picture(number: signal.Signals | None) -> None:
    """A close of the decoder (None) ends what is decoded, too."""
    with closing(PictureDecoder(PATIENT)) as decoder, ThreadPoolExecutor(1) as pool:
        good = decoder.decode(MODES["PNG"])
        process, ours = child(decoder), decoder._process
        if number == signal.SIGSTOP:
            ours._limits = replace(PATIENT, timeout_s=0.5)
        before = ours._deadline
        process.suspend()  # so that it is in the middle, however fast it is
        slow = pool.submit(decoder.decode, SLOW)
        wait_until(lambda: ours._deadline != before)
        decoder.close() if number is None else process.send_signal(number)
        if number == signal.SIGSEGV:
            process.resume()
        kind, words = InvalidPictureError, BEYOND
        if number is None:
            kind, words = RequestFailedError, "closed"
        with pytest.raises(kind, match=words):
            slow.result(PATIENCE_S)
        assert host.living_fields(process.pid) is None
        if number is not None:
            assert decoder.decode(MODES["PNG"]) == good


@pytest.mark.parametrize("size", [(1 << 31, 1 << 31), (0, 9), (4096, 4097)])
def test_false_answers_are_not_followed(decoder: PictureDecoder, size: tuple[int, int]) -> None:
    for is_early in (True, False):
        good = decoder.decode(MODES["PNG"])
        decoder._process._socket, theirs = socket.socketpair()
        with theirs, ThreadPoolExecutor(1) as pool:
            if is_early:  # before the order
                theirs.sendall(ANSWER.pack(Outcome.DECODED, *size))
                assert decoder.decode(MODES["PNG"]) == good
                continue
            picture = pool.submit(decoder.decode, MODES["PNG"])
            theirs.recv(1)
            theirs.sendall(ANSWER.pack(Outcome.DECODED, *size))
            with pytest.raises(InvalidPictureError, match=BEYOND):
                picture.result(PATIENCE_S)


def test_a_death_between_pictures_costs_none(decoder: PictureDecoder) -> None:
    decoder.decode(MODES["PNG"])
    process = child(decoder)
    process.kill()
    wait_until(lambda: host.living_fields(process.pid) is None)
    decoder.decode(MODES["PNG"])


def test_the_thread_that_came_first_may_end() -> None:
    with closing(PictureDecoder(PATIENT)) as decoder:
        thread = threading.Thread(target=decoder.decode, args=(MODES["PNG"],))
        thread.start()
        thread.join()
        first = child(decoder)
        with ThreadPoolExecutor(4) as pool:
            kinds = list(MODES) * 2
            pictures = list(pool.map(decoder.decode, [MODES[name] for name in kinds]))
        assert pictures[: len(MODES)] == pictures[len(MODES) :]
        assert child(decoder) == first


def test_a_wait_for_other_pictures_has_a_bound() -> None:
    refused = pytest.raises(QueueFullError, match=r"more than 0\.01 s")
    with closing(PictureDecoder(replace(PATIENT, wait_s=0.01))) as decoder, decoder._lock, refused:
        decoder.decode(MODES["PNG"])


def test_the_process_has_nothing_but_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with closing(PictureDecoder(PATIENT)) as decoder, open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        decoder.decode(MODES["PNG"])
        process = child(decoder)
        files = Path(f"/proc/{process.pid}/fd")
        names = sorted(os.readlink(path).split(":")[0] for path in files.iterdir())
        assert names == [os.devnull, os.devnull, "socket"]
        assert {*process.environ()} <= {*picture_decoder._VARIABLES, *picture_decoder._SET}
        for kind, value in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_FSIZE, 0)):
            assert process.rlimit(kind) == (value, value)
        assert process.rlimit(resource.RLIMIT_CORE) == (0, 0)
        assert 1 << 30 < process.rlimit(resource.RLIMIT_AS)[1] < 2 << 30
        assert process.rlimit(resource.RLIMIT_CPU)[0] < 20
        assert process.nice() == psutil.Process().nice()
    assert not process.is_running()
    with pytest.raises(RequestFailedError, match="closed"):
        decoder.decode(MODES["PNG"])


PARENT = f"""
from tpengine.pictures.picture_decoder import PictureDecoder
decoder = PictureDecoder()
decoder.decode(bytes.fromhex("{MODES["GIF"].hex()}"))
process = decoder._process._started.result()
process.send_signal(19)
print(process.pid, flush=True)
decoder.decode(bytes.fromhex("{MODES["GIF"].hex()}"))
"""


def test_a_stopped_process_ends_with_its_killed_parent() -> None:
    with running(sys.executable, "-c", PARENT, stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
    try:
        wait_until(lambda: host.living_fields(process.pid) is None, timeout_s=30)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for act in (PictureDecoder, lambda: from_image(RGB)):
        with pytest.raises(ConfigError, match=r"install tpengine\[pictures\]"):
            act()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_mutants_decode_or_are_refused(count: int) -> None:
    rng, files, num_decoded, num_deaths = random.Random(11), list(MODES.values()), 0, 0
    sizes: dict[int, tuple[int, int]] = {}
    with closing(PictureDecoder(replace(PATIENT, max_pixels=1 << 20))) as decoder:
        for i in range(1, count + 1):
            before = decoder._process
            try:
                damaged = mutated(rng.choice(files), rng)
                decoder.decode(with_checksums(damaged) if rng.random() < 0.8 else damaged)
                num_decoded += 1
            except InvalidPictureError:
                pass
            num_deaths += before is not None and not before.is_idle
            if i in (min(count // 2, 1000), count):
                decoder.decode(files[0])
                sizes[i] = (psutil.Process().memory_info().rss, child(decoder).memory_info().rss)
    print(f"{num_decoded} of {count} decoded, {num_deaths} deaths, resident: {sizes}")
    assert count / 10 < num_decoded < count * 9 / 10
    growth = np.subtract(sizes[count], sizes[min(count // 2, 1000)])
    assert max(growth) < 8 << 20, f"the parent and the child grew by {growth} bytes"
