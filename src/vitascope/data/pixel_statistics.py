"""Compute mean and standard deviation of a data set's pixels from exact counts, and keep them on disk."""

import json

import torch
from torch import Tensor

from vitascope.data.data_root import get_cache_folder, try_write_cache_file
from vitascope.data.dataset import ChannelStatistics, Dataset, UInt8Images

MIN_STD = 1e-3  # a constant channel must not divide by zero


def count_pixel_values(images: UInt8Images) -> Tensor:
    """Count how often each of the 256 pixel values occurs, channel × value."""
    return torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])])


def compute_mean_and_std(counts: Tensor) -> ChannelStatistics:
    """Compute the statistics from the counts of pixel values. Integers are summed without rounding errors."""
    values = torch.arange(256, dtype=torch.float64) / 255
    frequencies = counts.double() / counts.sum(1, keepdim=True)
    mean = frequencies @ values
    std = ((frequencies * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return ChannelStatistics(mean.float(), std.float().clamp(min=MIN_STD))


def compute_pixel_mean_and_std(images: UInt8Images) -> ChannelStatistics:
    """Compute mean and standard deviation per channel of images in memory."""
    return compute_mean_and_std(count_pixel_values(images))


def load_or_compute_statistics(dataset: Dataset) -> ChannelStatistics:
    """Return the statistics that are stored for the data set's fingerprint, or compute and store them."""
    path = get_cache_folder() / "statistics" / f"{dataset.fingerprint()}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return ChannelStatistics(torch.tensor(stored["mean"]), torch.tensor(stored["std"]))
    except (OSError, ValueError, KeyError, TypeError):
        statistics = compute_mean_and_std(dataset.count_pixel_values())
    try_write_cache_file(path, {"mean": statistics.mean.tolist(), "std": statistics.std.tolist()})
    return statistics
