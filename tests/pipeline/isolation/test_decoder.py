"""Pictures decoded in processes of their own: the same patches, and an end to whatever they do."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from support.pictures import image_spec
from support.worker_process import CODECS, codecs_environment

from dataservice.core.packspec import ImageSpec
from dataservice.core.vision import VisionRules
from dataservice.errors import DataServiceError, ImageError
from dataservice.pipeline.images import DecodeLimits, ImageDecoder
from dataservice.pipeline.isolation import IsolatedDecoder, picture_memory, process
from dataservice.pipeline.isolation.decoder import ASIDE_BYTES
from dataservice.pipeline.specs import num_patches

RULES = VisionRules(max_pixels=50176)
LIMITS = DecodeLimits(deadline_s=20.0, max_pixels=1_000_000)
HASTY = DecodeLimits(deadline_s=0.5, max_pixels=1_000_000)
MEMORY_BYTES = 200 << 20
ALL = ("sleep", "hang", "abort", "crash", "allocate")


def picture(width: int, height: int, form: str = "PNG") -> bytes:
    values = np.arange(height * width * 3, dtype=np.uint32) * 7 >> 3
    stored = io.BytesIO()
    Image.fromarray(values.astype(np.uint8).reshape(height, width, 3)).save(stored, form)
    return stored.getvalue()


def spec_of(width: int, height: int, member: str = "picture") -> ImageSpec:
    return image_spec(width, height, RULES, member)


def patches_of(decoder: ImageDecoder | IsolatedDecoder, data: bytes, spec: ImageSpec) -> np.ndarray:
    out = np.empty(RULES.pixel_shape(num_patches(spec, RULES)), np.uint8)
    decoder.prepare(data, spec)(out)
    return out


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedDecoder]:
    decoder = IsolatedDecoder(RULES, LIMITS, memory_bytes=MEMORY_BYTES)
    yield decoder
    decoder.close()


@pytest.fixture
def codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IsolatedDecoder]]:
    """Makes decoders whose processes have the test codecs."""
    for name, value in codecs_environment(ALL).items():
        monkeypatch.setenv(name, value)
    made = []

    def make(limits: DecodeLimits = LIMITS) -> IsolatedDecoder:
        made.append(IsolatedDecoder(RULES, limits, memory_bytes=MEMORY_BYTES))
        return made[-1]

    yield make
    for decoder in made:
        decoder.close()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("size", [(300, 200), (28, 28), (900, 31)])
def test_patches_are_those_of_the_decoder_in_place(
    isolated: IsolatedDecoder, form: str, size: tuple[int, int]
) -> None:
    data, spec = picture(*size, form), spec_of(*size)
    expected = patches_of(ImageDecoder(RULES, LIMITS), data, spec)
    assert np.array_equal(patches_of(isolated, data, spec), expected)


def test_refusals_are_those_of_the_decoder_in_place(isolated: IsolatedDecoder) -> None:
    good = picture(300, 200)
    patches_of(isolated, good, spec_of(300, 200))
    pids = isolated.pids
    for data, spec in [
        (good[:300], spec_of(300, 200)),
        (good, spec_of(300, 201)),
        (b"", spec_of(300, 200)),
        (b"no picture at all", spec_of(300, 200)),
    ]:
        with pytest.raises(ImageError) as expected:
            ImageDecoder(RULES, LIMITS).prepare(data, spec)
        with pytest.raises(ImageError) as found:
            isolated.prepare(data, spec)
        assert found.value.reason == expected.value.reason
    assert isolated.pids == pids, "a refusal costs no process"


@pytest.mark.parametrize(("kind", "signal_name"), [("abort", "SIGABRT"), ("crash", "SIGSEGV")])
def test_a_death_is_tried_once_more_and_then_a_hole(
    codecs: Callable[..., IsolatedDecoder],
    kind: str,
    signal_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    start = process.DecoderProcess.__init__

    def counted(self: process.DecoderProcess, setup: object) -> None:
        started.append(self)
        start(self, setup)

    monkeypatch.setattr(process.DecoderProcess, "__init__", counted)
    decoder, data = codecs(), picture(300, 200)
    with pytest.raises(ImageError, match=rf"^the decoder process died \({signal_name}\)$"):
        decoder.prepare(data, spec_of(300, 200, f"codec-{kind}"))
    assert len(started) == 2
    assert decoder.pids == []
    spec = spec_of(300, 200)
    expected = patches_of(ImageDecoder(RULES, LIMITS), data, spec)
    assert np.array_equal(patches_of(decoder, data, spec), expected)


def test_a_death_that_was_not_the_pictures_fault_costs_nothing(isolated: IsolatedDecoder) -> None:
    data, spec = picture(300, 200), spec_of(300, 200)
    expected = patches_of(isolated, data, spec)
    for pid in isolated.pids:
        os.kill(pid, signal.SIGKILL)
    assert np.array_equal(patches_of(isolated, data, spec), expected)


@pytest.mark.parametrize("kind", ["sleep", "hang"])
def test_a_hang_ends_at_the_deadline(codecs: Callable[..., IsolatedDecoder], kind: str) -> None:
    decoder, data = codecs(HASTY), picture(300, 200)
    patches_of(decoder, data, spec_of(300, 200))
    (pid,) = decoder.pids
    with pytest.raises(ImageError, match=r"^decode took longer than 0\.5 s$"):
        decoder.prepare(data, spec_of(300, 200, f"codec-{kind}"))
    assert decoder.pids == []
    assert not psutil.pid_exists(pid)


def test_memory_is_bounded(codecs: Callable[..., IsolatedDecoder]) -> None:
    decoder, data = codecs(), picture(300, 200)
    with pytest.raises(ImageError, match=r"^decoding it takes more than 200 MiB of memory$"):
        decoder.prepare(data, spec_of(300, 200, "codec-allocate"))
    assert decoder.pids == []


@pytest.mark.parametrize(
    ("form", "mode"),
    [("JPEG2000", "RGBA"), ("AVIF", "RGB"), ("JPEG", "CMYK"), ("PNG", "I;16"), ("WEBP", "RGBA")],
)
def test_any_picture_within_the_limits_has_memory_enough(form: str, mode: str) -> None:
    """Also without the part of `picture_memory` that does not grow with the picture."""
    width, height = 2000, 1500
    image = Image.open(io.BytesIO(picture(width, height)))
    if mode == "I;16":
        image = image.convert("L")
    stored = io.BytesIO()
    image.convert(mode).save(stored, form)
    data = stored.getvalue()
    limits = DecodeLimits(deadline_s=60.0, max_pixels=width * height, max_bytes=len(data))
    memory_bytes = picture_memory(limits.max_pixels, limits.max_bytes) - ASIDE_BYTES
    decoder = IsolatedDecoder(RULES, limits, memory_bytes=memory_bytes)
    try:
        spec = spec_of(width, height)
        expected = patches_of(ImageDecoder(RULES, limits), data, spec)
        assert np.array_equal(patches_of(decoder, data, spec), expected)
    finally:
        decoder.close()


def test_a_process_for_each_thread_that_decodes(isolated: IsolatedDecoder) -> None:
    data, spec = picture(300, 200), spec_of(300, 200)
    expected = patches_of(isolated, data, spec)
    found: list[np.ndarray] = []

    def decode_some() -> None:
        found.extend(patches_of(isolated, data, spec) for _ in range(5))

    threads = [threading.Thread(target=decode_some) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    assert all(np.array_equal(patches, expected) for patches in found)
    assert 1 <= len(isolated.pids) <= 2


def test_idle_processes_end(isolated: IsolatedDecoder) -> None:
    data, spec = picture(300, 200), spec_of(300, 200)
    patches_of(isolated, data, spec)
    pids = isolated.pids
    isolated.close_idle(3600.0)
    assert isolated.pids == pids
    isolated.close_idle(0.0)
    assert isolated.pids == []
    assert not any(map(psutil.pid_exists, pids))


def test_one_that_does_not_start_is_not_the_pictures_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = IsolatedDecoder(RULES, LIMITS, memory_bytes=MEMORY_BYTES)
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(DataServiceError, match="did not start: exit code 3") as error:
        decoder.prepare(picture(30, 30), spec_of(30, 30))
    assert not isinstance(error.value, ImageError)


def test_nonsense_is_a_death(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    liar = tmp_path / "liar.py"
    liar.write_text(
        "import socket, sys, time\n"
        "from dataservice.pipeline.isolation.frames import Ready, Setup, Task, Wire\n"
        "end = socket.socket(fileno=int(sys.argv[1]))\n"
        "wire = Wire(end)\n"
        "wire.receive(Setup)\n"
        "wire.send(Ready())\n"
        "wire.receive(Task)\n"
        "end.sendall(b'\\xff' * 4096)\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setattr(process, "COMMAND", (sys.executable, str(liar)))
    decoder = IsolatedDecoder(RULES, LIMITS, memory_bytes=MEMORY_BYTES)
    with pytest.raises(ImageError, match="its answer made no sense"):
        decoder.prepare(picture(30, 30), spec_of(30, 30))


def test_a_closed_one_leaves_nothing(codecs: Callable[..., IsolatedDecoder]) -> None:
    decoder, failed = codecs(), []

    def decode() -> None:
        try:
            decoder.prepare(picture(300, 200), spec_of(300, 200, "codec-sleep"))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    while not decoder.pids:
        time.sleep(0.01)
    pids = decoder.pids
    decoder.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(failed) == 1
    assert not any(map(psutil.pid_exists, pids))
    decoder.close()


@pytest.mark.parametrize("kind", ["fine", "codec-hang"])
def test_it_does_not_outlive_its_worker(
    kind: str, tmp_path: Path, codecs: Callable[..., IsolatedDecoder]
) -> None:
    """Idle it sees the socket close; stuck in C with Python locked up its alarm ends it."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, threading, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"sys.path.insert(0, {str(CODECS.parent.parent)!r})\n"
        "from dataservice.pipeline.isolation import child, IsolatedDecoder\n"
        "from test_decoder import HASTY, MEMORY_BYTES, RULES, picture, spec_of\n"
        "decoder = IsolatedDecoder(RULES, HASTY, memory_bytes=MEMORY_BYTES)\n"
        "decoder.prepare(picture(30, 30), spec_of(30, 30))\n"
        "print(*decoder.pids, flush=True)\n"
        f"task = lambda: decoder.prepare(picture(30, 30), spec_of(30, 30, {kind!r}))\n"
        "threading.Thread(target=task, daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=60
    )
    pid = int(done.stdout)
    end = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
