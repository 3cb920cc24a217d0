"""Image files of odd sizes and kinds, from real photos where they are on this machine, else from generated ones."""

from pathlib import Path

import torch
from PIL import ExifTags, Image

REAL_PHOTOS = Path(__file__).parents[2] / "shared" / "data" / "photos" / "imagenet"
NUM_GENERATED = 8
MAX_SIDE = 211  # pixels
SHAPES = ("as it is", "very wide", "very tall", "tiny", "odd sides", "one pixel high")
KINDS = ("RGB", "rotated by EXIF", "L", "RGBA", "CMYK", "P", "LA", "mirrored by EXIF")


def write_odd_photos(folder: Path, count: int) -> list[Path]:
    """Write `count` files, each with another shape or kind."""
    folder.mkdir()
    sources = _load_real_photos(count) or [_generate_photo(number) for number in range(NUM_GENERATED)]
    return [
        _write_as_kind(_reshape(sources[n % len(sources)], n), KINDS[n % len(KINDS)], folder, n) for n in range(count)
    ]


def _load_real_photos(count: int) -> list[Image.Image]:
    """Return smaller copies, so that the tests are fast."""
    photos = [Image.open(path).convert("RGB") for path in sorted(REAL_PHOTOS.glob("*.JPEG"))[:count]]
    for photo in photos:
        photo.thumbnail((MAX_SIDE, MAX_SIDE))
    return photos


def _generate_photo(seed: int) -> Image.Image:
    """Coloured rectangles with noise: edges and texture, so that a shift by half a pixel is visible."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(3, 6, 9, generator=generator).repeat_interleave(17 + seed, 1).repeat_interleave(23 - seed, 2)
    noise = torch.rand(blocks.shape, generator=generator)
    return Image.fromarray((255 * (0.7 * blocks + 0.3 * noise)).byte().permute(1, 2, 0).numpy())


def _reshape(photo: Image.Image, number: int) -> Image.Image:
    width, height = photo.size
    size = {
        "as it is": (width, height),
        "very wide": (width, max(3, height // 9)),
        "very tall": (max(3, width // 7), height),
        "tiny": (width // 40 + 3, height // 31 + 2),
        "odd sides": (width // 2 * 2 - 1, height // 2 * 2 - 3),
        "one pixel high": (width // 8, 1),
    }[SHAPES[number % len(SHAPES)]]
    return photo.resize(size)


def _write_as_kind(photo: Image.Image, kind: str, folder: Path, number: int) -> Path:
    path = folder / f"{number}-{kind.replace(' ', '-')}.{'jpg' if kind in ('CMYK', 'L') or 'EXIF' in kind else 'png'}"
    if kind in ("RGBA", "LA"):
        photo = photo.convert(kind)
        photo.putalpha(Image.linear_gradient("L").resize(photo.size))
    elif "EXIF" in kind:
        exif = photo.getexif()
        exif[ExifTags.Base.Orientation] = 6 if "rotated" in kind else 7
        photo.info["exif"] = exif.tobytes()
    else:
        photo = photo.convert(kind)
    photo.save(path, exif=photo.info.get("exif", b""))
    return path
