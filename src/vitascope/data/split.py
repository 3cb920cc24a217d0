"""Split images into training and validation: stratified, drawn from the seed, never overlapping."""

import torch
from torch import Tensor

from vitascope.data.source import Labels
from vitascope.errors import UserError


def validation_split(labels: Labels, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """(training indices, validation indices): the fraction `share` of each class is held out, at least one if > 0."""
    train, held = [], []
    for members in shuffled_classes(labels, seed):
        count = max(1, round(share * len(members))) if share > 0 else 0
        if count >= len(members) and share > 0:
            raise UserError(
                f"A class has only {len(members)} image(s): none would be left for training. Set data.validation=0."
            )
        held.append(members[:count])
        train.append(members[count:])
    return torch.cat(train).sort().values, torch.cat(held).sort().values


def stratified_part(labels: Labels, share: float, seed: int) -> Tensor:
    """Indices of the fraction `share` of each class, at least one."""
    if share == 1:
        return torch.arange(len(labels))
    parts = [members[: max(1, round(share * len(members)))] for members in shuffled_classes(labels, seed)]
    return torch.cat(parts).sort().values


def shuffled_classes(labels: Labels, seed: int) -> list[Tensor]:
    """For each class the indices of its images, shuffled with the seed."""
    generator = torch.Generator().manual_seed(seed)
    members = [(labels == number).nonzero().flatten() for number in range(int(labels.max()) + 1)]
    return [index[torch.randperm(len(index), generator=generator)] for index in members if len(index)]
