"""Pixels in the form that vision models read, and the copy to a device."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dataservice.errors import ConfigError
from trainer_client.batch import MicroBatch, VisionInfo, build_micro_batch
from trainer_client.device import DeviceCopier, normalize
from trainer_client.testing import FAKE_INFO, padding_pack, synthetic_packs

VISION = VisionInfo.of(FAKE_INFO)


def batch_with_images() -> MicroBatch:
    pack = synthetic_packs(1, image_share=1.0)[0]
    return build_micro_batch(
        [(pack.arrays, pack.meta)],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VISION,
    )


def expected_values(pixels: np.ndarray) -> np.ndarray:
    """By the definition, patch by patch: channel, time, row, column."""
    values = np.zeros((len(pixels), 3, VISION.temporal_patch, VISION.patch**2))
    for i, patch in enumerate(pixels.reshape(len(pixels), 3, -1)):
        for channel in range(3):
            value = (patch[channel] / 255 - VISION.mean[channel]) / VISION.std[channel]
            values[i, channel, :] = value
    return values.reshape(len(pixels), -1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
)
def test_normalize_follows_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    batch = batch_with_images()
    before = batch["pixel_values"].clone()
    values = normalize(batch, dtype)
    assert values.dtype == dtype
    expected = expected_values(batch["pixel_values"].numpy())
    np.testing.assert_allclose(values.double().numpy(), expected, atol=tolerance)
    assert torch.equal(batch["pixel_values"], before)


def test_normalize_of_tiles() -> None:
    info = replace(FAKE_INFO, pack_length=256, tile=4, thumbnail=True, tile_tokens=3)
    pack = synthetic_packs(1, image_share=1.0, info=info)[0]
    batch = build_micro_batch(
        [(pack.arrays, pack.meta)],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VisionInfo.of(info),
    )
    values = normalize(batch, torch.float64)
    pixels = pack.arrays["pixel_values"].reshape(-1, 3, 4, 4)
    assert values.shape == pixels.shape
    for channel in range(3):
        expected = (pixels[:, channel] / 255 - info.mean[channel]) / info.std[channel]
        np.testing.assert_allclose(values[:, channel].numpy(), expected, atol=1e-12)


def test_normalize_without_images() -> None:
    pack = padding_pack()
    batch = build_micro_batch(
        [(pack.arrays, pack.meta)],
        meta={"step": 0, "micro_step": 0},
        is_last_micro_step=True,
        vision=VISION,
    )
    assert normalize(batch).shape == (0, 3 * VISION.temporal_patch * VISION.patch**2)


def test_on_the_cpu_nothing_is_copied() -> None:
    copier, batch = DeviceCopier("cpu"), batch_with_images()
    pixels = batch["pixel_values"]
    assert copier.move(batch) is batch
    assert batch["pixel_values"] is pixels
    assert copier.device_bytes(batch) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_copier_that_normalises(dtype: torch.dtype) -> None:
    copier, raw = DeviceCopier("cpu", normalize_to=dtype), batch_with_images()
    before = raw["pixel_values"].nbytes
    batch = copier.move(batch_with_images())
    assert torch.equal(batch["pixel_values"], normalize(raw, dtype))
    assert batch["pixel_values"].nbytes == before * copier.host_growth(VISION)


class Recorder:
    """Streams and events that note what they are given, for a CUDA that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        recorder = self

        class Event:
            def record(self, stream: object) -> None:
                recorder.log.append(f"record on {stream}")

            def query(self) -> bool:
                return True

        class Stream(str):
            def wait_event(self, _event: Event) -> None:
                recorder.log.append(f"{self} waits")

        self.copies = Stream("copies")

        def recorded(_tensor: torch.Tensor, stream: object) -> None:
            recorder.log.append(f"memory is used on {stream}")

        def pinned(tensor: torch.Tensor) -> torch.Tensor:
            recorder.log.append("pin")
            return tensor

        @contextmanager
        def on(stream: object) -> Iterator[None]:
            recorder.log.append(f"on {stream}")
            yield
            recorder.log.append(f"off {stream}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream("consumer"))
        monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)

    def copier(self, dtype: torch.dtype | None) -> DeviceCopier:
        copier = DeviceCopier("cpu", normalize_to=dtype)
        copier._cuda, copier.stream = True, self.copies  # type: ignore[assignment]
        return copier


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_the_streams_are_given(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    recorder = Recorder(monkeypatch)
    copier, raw = recorder.copier(dtype), batch_with_images()
    tensors = sum(isinstance(value, torch.Tensor) for value in raw.values())
    staged = copier.stage(batch_with_images())
    assert recorder.log == ["pin"] * tensors
    assert copier.host_growth(VISION) == 1
    recorder.log.clear()
    copy = copier.start(staged)
    assert recorder.log == ["on copies", "record on copies", "off copies"]
    assert copier._in_flight[0][1] is staged
    recorder.log.clear()
    batch = copier.finish(copy)
    assert recorder.log == ["consumer waits"] + ["memory is used on consumer"] * tensors
    expected = raw["pixel_values"] if dtype is None else normalize(raw, dtype)
    assert torch.equal(batch["pixel_values"], expected)
    assert batch.meta is staged.meta
    assert batch.size_bytes == copier.device_bytes(raw)
    copier.start(copier.stage(batch_with_images()))
    assert len(copier._in_flight) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ConfigError, match='device="cuda"'):
        DeviceCopier("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_check_of_a_gpu_says_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(benchmarks / "gpu_check.py"), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == "no CUDA here\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_batches_are_complete() -> None:
    copier, batch = DeviceCopier("cuda"), batch_with_images()
    expected = normalize(batch, torch.float64)
    moved = copier.move(batch)
    assert moved["pixel_values"].is_cuda
    assert moved.meta == batch.meta
    np.testing.assert_allclose(normalize(moved, torch.float64).cpu(), expected, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_cuda_normalises_as_the_cpu_does(dtype: torch.dtype) -> None:
    copier, batch = DeviceCopier("cuda", normalize_to=dtype), batch_with_images()
    expected = normalize(batch, dtype)
    assert torch.equal(copier.move(batch)["pixel_values"].cpu(), expected)
