"""Make wrong inputs: random mutations of bytes, JSON data and text, and values that are likely to break readers."""

import copy
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

IMAGE_FORMATS = ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm")
ODD_NUMBERS = (
    "-1",
    "0",
    "1",
    "2.5",
    "1e400",
    "nan",
    "-inf",
    "9" * 30,
    "9" * 5000,
    "1e9",
    "0x10",
    "1_000",
    "٣",
    "1000000000",
)
ODD_TEXTS = (
    *(
        "",
        " ",
        "-",
        "--",
        "=",
        "==",
        "a=b",
        "~",
        "*",
        ".",
        "..",
        "../..",
        "[",
        "{",
        "}",
        "]",
        "[1,2",
        "{a: 1",
        "null",
        "true",
    ),
    *(
        "\n",
        "\t",
        "\x1b[31m",
        "\x07",
        "%s",
        "{0}",
        "<script>",
        "</script>",
        "<!--",
        "'; DROP TABLE",
        "&a",
        "*a",
        "!!python/name:os",
    ),
    *(
        "${oc.env:HOME}",
        "${model.depth}",
        "${",
        "$HOME",
        "\udcff",
        "ü" * 300,
        "💥",
        "a" * 5000,
        "a/" * 500,
        "\u202e",
        "/dev/null",
    ),
    *(
        "hf:",
        "hf:nobody",
        "timm:",
        "timm:nothing",
        "data:",
        "data:nothing",
        "model",
        "model.",
        ".depth=1",
        "model..depth=1",
    ),
)
ODD_JSON = (
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": 0},
)
ODD_OPTIONS = ("--help", "-h", "--json", "--no-such-option", "--out", "--views", "-x", "--", "--version")


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change, remove, repeat or append some bytes."""
    data, position = bytearray(content), rng.randrange(len(content) + 1)
    match rng.randrange(7):
        case 0:
            return content[:position]
        case 1:
            return content[position:]
        case 2:
            return content + rng.randbytes(rng.randrange(1, 50))
        case 3:
            return content[:position] + rng.randbytes(rng.randrange(1, 50)) + content[position:]
        case 4:
            return rng.randbytes(rng.randrange(200))
        case _:
            for _ in range(rng.randrange(1, 20)):
                place = rng.randrange(min(len(data), rng.choice((64, len(data)))))
                data[place] = rng.choice((0, 255, rng.randrange(256)))
            return bytes(data)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Return a copy in which one entry is replaced, removed, renamed or nested deeply."""
    value = copy.deepcopy(value)
    container = value
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if not keys:
            return _choose_odd_json(rng)
        key = rng.choice(keys)
        if isinstance(container[key], dict | list) and container[key] and rng.random() < 0.8:
            container = container[key]
            continue
        if isinstance(container, dict) and rng.random() < 0.2:
            old = container.pop(key)
            if rng.random() < 0.5:
                container[rng.choice(ODD_TEXTS)] = old
        else:
            container[key] = _choose_odd_json(rng)
        return value


def _choose_odd_json(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        nested: Any = []
        for _ in range(400):
            nested = [nested]
        return nested
    return copy.deepcopy(rng.choice((*ODD_JSON, 10**9, 2**31, 2**63, "a" * 10000)))


def mutate_json_text(rng: random.Random, value: Any) -> bytes:
    """Return JSON text with one wrong entry, or with wrong bytes."""
    if rng.random() < 0.03:
        return b"[" * 100_000
    if rng.random() < 0.2:
        return mutate_bytes(rng, json.dumps(value).encode())
    return json.dumps(mutate_json(rng, value)).encode()


def mutate_yaml(rng: random.Random, text: str) -> bytes:
    """Change some lines of a recipe: their values, keys, order, indentation and bytes."""
    lines = text.splitlines()
    for _ in range(rng.randrange(1, 4)):
        index = rng.randrange(len(lines))
        key, _, _ = lines[index].partition(":")
        odd = rng.choice((*ODD_NUMBERS, *ODD_TEXTS))
        match rng.randrange(8):
            case 0:
                lines.insert(index, rng.choice(lines))
            case 1:
                lines[index] = f"{odd}: 1"
            case 2:
                lines[index] = " " + lines[index]
            case 3:
                lines[index] = f"{key}: {'[' * 500}{']' * 500}"
            case 4:
                lines[index : index + 1] = ["a: &a [1, 2]", *(f"b{n}: &b{n} [*a, *a]" for n in range(9))]
            case _:
                lines[index] = f"{key}: {odd}"
    content = "\n".join(lines).encode(errors="surrogateescape")
    return mutate_bytes(rng, content) if rng.random() < 0.2 else content


def make_image(rng: random.Random, image_format: str) -> bytes:
    mode, size = rng.choice(("L", "RGB")), (rng.randrange(1, 20), rng.randrange(1, 20))
    pixels = np.frombuffer(rng.randbytes(size[0] * size[1] * (3 if mode == "RGB" else 1)), np.uint8)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    buffer = io.BytesIO()
    Image.fromarray(pixels.reshape(shape)).save(buffer, image_format)
    return buffer.getvalue()


def write_digit_image(path: Path) -> Path:
    pixels = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(path)
    return path
