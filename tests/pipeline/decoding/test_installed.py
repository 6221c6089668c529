from __future__ import annotations

import importlib.metadata

import pytest

from dataservice.errors import ConfigError
from dataservice.pipeline.decoding import installed
from dataservice.pipeline.decoding.installed import check_decoders, decoder_fingerprint


def test_fingerprint_names_every_library_and_does_not_change() -> None:
    text = decoder_fingerprint()
    names = [part.rsplit(" ", 1)[0] for part in text.split(", ")]
    for name in ("pillow", "libjpeg_turbo", "simplejpeg", "imagecodecs", "resampling", "probe"):
        assert name in names
    decoder_fingerprint.cache_clear()
    assert decoder_fingerprint() == text


def test_other_pixels_are_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "FORMATS", ("JPEG",))
    digest = installed._probe_digest()
    real = installed.decode_whole

    def brighter(data, header, rules):
        decoded = real(data, header, rules)
        decoded.pixels[0, 0, 0] ^= 1
        return decoded

    monkeypatch.setattr(installed, "decode_whole", brighter)
    assert installed._probe_digest() != digest


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    def version(name: str) -> str:
        try:
            return found[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_pillow_has_to_be_the_stock_one(monkeypatch: pytest.MonkeyPatch) -> None:
    check_decoders()
    versions(monkeypatch, pillow_simd="9.5.0", pillow="12.1.1")
    with pytest.raises(
        ConfigError, match=r"pillow-simd 9\.5\.0 .*`pip uninstall pillow pillow-simd`"
    ):
        check_decoders()
    versions(monkeypatch, pillow="99.0")
    with pytest.raises(ConfigError, match=r"pillow 99\.0 is installed, but the files are those of"):
        check_decoders()


def test_codecs_have_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.features, "check", lambda name: name != "webp")
    with pytest.raises(ConfigError, match=r"was built without webp: .*`pip install pillow`"):
        check_decoders()
    monkeypatch.setattr(installed.features, "check", lambda name: True)
    monkeypatch.setattr(installed.imagecodecs.WEBP, "available", False)
    with pytest.raises(
        ConfigError, match=r"imagecodecs .* was built without libwebp: `pip install"
    ):
        check_decoders()
