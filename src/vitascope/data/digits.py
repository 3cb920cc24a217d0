"""scikit-learn's 1,797 handwritten digits, 8×8 grey: embedded, so that everything works without a download."""

import torch

from vitascope.data.source import Source, Split

SPLIT_SEED = 0  # the test part is a fixed stratified half


def digits() -> Source:
    return Source("digits", [str(number) for number in range(10)], _load)


def _load(split: str) -> Split:
    from sklearn.datasets import load_digits  # seconds to import
    from sklearn.model_selection import train_test_split

    pixels, numbers = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels).reshape(-1, 1, 8, 8)
    images = (images * (255 / 16)).round().to(torch.uint8)  # stored as 0 to 16
    labels = torch.as_tensor(numbers).long()
    halves = train_test_split(
        torch.arange(len(labels)).numpy(), test_size=0.5, random_state=SPLIT_SEED, stratify=numbers
    )
    index = torch.as_tensor(halves[0 if split == "train" else 1])
    return Split(images[index], labels[index])
