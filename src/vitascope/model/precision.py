"""Tensors -> the format in which products are made: autocast's where it is on."""

import torch
from torch import Tensor


def product_dtype(tensor: Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def narrowed(tensor: Tensor) -> Tensor:
    return tensor.to(product_dtype(tensor))
