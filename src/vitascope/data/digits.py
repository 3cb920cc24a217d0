"""The 1,797 handwritten digits of scikit-learn, 8×8 grey, shipped in `digits.npz` so that nothing is downloaded.

From UCI's "Optical Recognition of Handwritten Digits" (CC BY 4.0; E. Alpaydin, C. Kaynak, 1998). Pixel values of
0 to 16 are scaled to 0 to 255. Training and test images are the halves of scikit-learn's `train_test_split` with
`test_size=0.5, random_state=0, stratify=labels`; a test compares them with scikit-learn's.
"""

from pathlib import Path

import numpy as np
import torch

from vitascope.data.source import Source, Split

FILE = Path(__file__).with_name("digits.npz")


def digits() -> Source:
    return Source("digits", [str(number) for number in range(10)], load_digits_split)


def load_digits_split(split: str) -> Split:
    with np.load(FILE) as arrays:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return Split(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long())
