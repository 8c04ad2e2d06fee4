"""Makes a screenshot smaller: the same picture with at most 256 colors, and the strongest compression.

A browser's screenshot is a PNG with 8 bits for each of red, green, blue (and alpha). A page of text has few
colors, and very many shades of them at the edges of its letters. The 256 colors that cover most stay as they are.
Every other one becomes the nearest of them.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {2: 3, 6: 4}  # by color type: RGB, RGBA


def smaller(picture: bytes) -> bytes:
    """The same picture as a PNG with a palette."""
    width, height, rows = _decoded(picture)
    colors = Counter(pixel for row in rows for pixel in row)
    palette = [color for color, _ in colors.most_common(256)]
    number = {color: _nearest(color, palette) for color in colors}
    lines = b"".join(b"\0" + bytes([number[pixel] for pixel in row]) for row in rows)
    return b"".join([
        _SIGNATURE,
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"PLTE", b"".join(palette)),
        _chunk(b"IDAT", zlib.compress(lines, 9)),
        _chunk(b"IEND", b""),
    ])  # fmt: skip


def _nearest(color: bytes, palette: list[bytes]) -> int:
    """The place of the palette's color that is most like this one."""
    red, green, blue = color
    return min(
        range(len(palette)),
        key=lambda at: (palette[at][0] - red) ** 2 + (palette[at][1] - green) ** 2 + (palette[at][2] - blue) ** 2,
    )


def _decoded(picture: bytes) -> tuple[int, int, list[list[bytes]]]:
    """Width, height, and the rows of pixels, each three bytes."""
    chunks = list(_chunks(picture))
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if depth != 8 or kind not in _CHANNELS or interlaced:
        raise ValueError(f"this is not a browser's PNG: {depth} bits, color type {kind}")
    size = _CHANNELS[kind]
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    rows, above, stride = [], bytearray(width * size), width * size + 1
    for number in range(height):
        line = data[number * stride : (number + 1) * stride]
        above = _unfiltered(line[0], bytearray(line[1:]), above, size)
        rows.append([bytes(above[at : at + 3]) for at in range(0, len(above), size)])
    return width, height, rows


def _unfiltered(kind: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    """A line of the file as pixels: what the file has is the difference to its neighbors."""
    for at in range(len(line)) if kind else ():
        left = line[at - size] if at >= size else 0
        up_left = above[at - size] if at >= size else 0
        line[at] = (line[at] + _expected(kind, left, above[at], up_left)) & 255
    return line


def _expected(kind: int, left: int, up: int, up_left: int) -> int:
    if kind < 4:
        return (0, left, up, (left + up) // 2)[kind]
    guess = left + up - up_left
    return min((left, up, up_left), key=lambda one: abs(guess - one))


def _chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(_SIGNATURE)
    while at < len(picture):
        (length,) = struct.unpack(">I", picture[at : at + 4])
        found.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]))
        at += length + 12
    return found


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
