"""Images -> vectors in a file, with what the model says of each."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitascope.errors import UserError
from vitascope.evaluation.prediction import Predictions
from vitascope.evaluation.reading import read_files
from vitascope.evaluation.trained import TrainedTransformer


@dataclass(frozen=True)
class Embedding:
    """Per image: its file, the folder it lies in, what the model says of it, its features."""

    files: list[str]
    folders: list[str]
    said: Predictions
    features: Tensor
    broken: list[str]  # files that could not be read

    def save(self, path: Path) -> Path:
        """.npz with features, file, folder, predicted, probability; or .parquet with the same columns."""
        if path.suffix not in WRITERS:
            raise UserError(f"Features cannot be written as '{path.name}'. Choose an ending: {', '.join(WRITERS)}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {"file": self.files, "folder": self.folders, "predicted": self.said.labels}
        WRITERS[path.suffix](path, columns, [item.probability for item in self.said], self.features.numpy())
        return path


def embed(model: TrainedTransformer, paths: list[Path]) -> Embedding:
    """Every image in the folders, preprocessed as in training."""
    images, names, broken = read_files(paths, model.facts.stored)
    return Embedding(
        names, [Path(name).parent.name for name in names], model.predict(images), model.stored_features(images), broken
    )


def _write_npz(path: Path, columns: dict[str, list[str]], shares: list[float], features: NDArray) -> None:
    arrays = {name: np.array(values) for name, values in columns.items()}
    arrays |= {"probability": np.array(shares), "features": features}
    with zipfile.ZipFile(path, "w") as archive:  # not np.savez, whose own argument is called file
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _write_parquet(path: Path, columns: dict[str, list[str]], shares: list[float], features: NDArray) -> None:
    import pyarrow as pa  # pyright: ignore[reportMissingImports] - an extra
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    flat = pa.array(features.reshape(-1))
    table = columns | {"probability": shares, "features": pa.FixedSizeListArray.from_arrays(flat, features.shape[1])}
    pq.write_table(pa.table(table), path)


WRITERS = {".npz": _write_npz, ".parquet": _write_parquet}
