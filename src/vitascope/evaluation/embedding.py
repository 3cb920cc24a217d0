"""Compute features of images and save them in a file, with the predicted classes."""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.source import UInt8Images
from vitascope.errors import UserError
from vitascope.evaluation.prediction import Predictions
from vitascope.evaluation.reading import read_files
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.run.files import make_folder, write_whole


@dataclass(frozen=True)
class Embedding:
    """For each image: its file, its folder, its prediction and its features."""

    files: list[str]
    folders: list[str]
    images: UInt8Images
    said: Predictions | None  # None: the model has no classifier
    features: Tensor
    broken: list[str]  # files that could not be read

    def save(self, path: Path) -> Path:
        """Write an .npz or .parquet file: features, file, folder and, with a classifier, predicted and probability."""
        check_ending(path)
        columns: dict[str, list[str] | list[float]] = {"file": self.files, "folder": self.folders}
        if self.said is not None:
            columns |= {"predicted": self.said.labels, "probability": [item.probability for item in self.said]}
        content = WRITERS[path.suffix](columns, self.features.numpy())
        make_folder(path.parent)
        write_whole(path, content)
        return path


def check_ending(path: Path) -> None:
    if path.suffix not in WRITERS:
        raise UserError(f"Features cannot be written as '{path.name}'. Choose an ending: {', '.join(WRITERS)}.")


def embed(model: TrainedTransformer, paths: list[Path]) -> Embedding:
    """Compute the features of every image in the folders, preprocessed as in training."""
    pictures = read_files(paths, model.facts.stored)
    files = pictures.files or []
    folders = [Path(name).resolve().parent.name for name in files]
    said, features = model.predict_with_features(pictures)
    return Embedding(files, folders, pictures.images, said, features, pictures.broken)


def _as_npz(columns: dict[str, list[str] | list[float]], features: NDArray) -> bytes:
    arrays = {name: np.array(values) for name, values in columns.items()} | {"features": features}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:  # not np.savez, whose own argument is called file
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return whole.getvalue()


def _as_parquet(columns: dict[str, list[str] | list[float]], features: NDArray) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(features.reshape(-1))
    table = columns | {"features": pa.FixedSizeListArray.from_arrays(flat, features.shape[1])}
    whole = io.BytesIO()
    pq.write_table(pa.table(table), whole)
    return whole.getvalue()


WRITERS = {".npz": _as_npz, ".parquet": _as_parquet}
