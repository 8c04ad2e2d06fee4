"""The pictures of the console: each page that names one has it in light and dark, and none is large."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
LARGEST_BYTES = 150_000


def named_in(page: Path) -> set[Path]:
    return {(page.parent / name).resolve() for name in re.findall(r'src(?:set)?="([^"]+\.png)"', page.read_text())}


def test_every_picture_is_there_in_light_and_dark_and_is_small() -> None:
    named = named_in(ROOT / "README.md") | named_in(ROOT / "docs" / "guide" / "console.md")
    assert named == set(FOLDER.glob("*.png"))
    for light in FOLDER.glob("*-light.png"):
        dark = light.with_name(light.name.replace("-light", "-dark"))
        assert dark in named
        assert dimensions(light) == dimensions(dark)
    assert all(path.stat().st_size < LARGEST_BYTES for path in named)


def dimensions(picture: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


def test_a_smaller_picture_is_the_same_picture(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import small_png

    shades = [bytes([value, value, 255 - value]) for value in range(256)]
    rows = [[shade] * 3 for shade in shades]
    lines = b"".join(b"\1" + row[0] + bytes(6) for row in rows)  # each pixel is what is left of it
    chunk, header = small_png._chunk, struct.pack(">IIBBBBB", 3, 256, 8, 2, 0, 0, 0)
    picture = b"".join([
        small_png._SIGNATURE, chunk(b"IHDR", header), chunk(b"IDAT", small_png.zlib.compress(lines)),
    ])  # fmt: skip
    assert small_png._decoded(picture) == (3, 256, rows)
    made = dict(small_png._chunks(small_png.smaller(picture)))
    assert set(zip(*[iter(made[b"PLTE"])] * 3, strict=True)) == {tuple(shade) for shade in shades}
