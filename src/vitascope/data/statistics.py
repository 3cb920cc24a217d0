"""Images -> mean and standard deviation per channel, exactly, and copies of the same image."""

import hashlib
from collections import Counter

import torch
from torch import Tensor

from vitascope.data.source import UInt8Images


def mean_and_std(images: UInt8Images) -> tuple[Tensor, Tensor]:
    """Per channel, of pixels scaled to 0…1; from integer histograms, so no rounding however many images there are."""
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(images[:, c].flatten().int(), minlength=256) for c in range(images.shape[1])])
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ values
    std = ((shares * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return mean.float(), std.float().clamp(min=1e-3)  # a constant channel must not divide by zero


def fingerprints(images: UInt8Images) -> list[bytes]:
    """One short hash per image: equal images, equal hashes."""
    return [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in images]


def repeated(prints: list[bytes]) -> int:
    """How many images are copies of an earlier one."""
    return sum(count - 1 for count in Counter(prints).values())


def shared(prints: list[bytes], others: list[bytes]) -> int:
    """How many of `others` also occur in `prints`."""
    known = set(prints)
    return sum(print_ in known for print_ in others)


def data_hash(images: UInt8Images, labels: Tensor) -> str:
    """One short name for exactly these images and labels in this order."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(images.numpy().tobytes())
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()
