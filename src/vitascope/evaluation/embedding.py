"""Compute and save features of images, and find the images with the most similar features."""

import hashlib
import io
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.dataset import Split, UInt8Images
from vitascope.data.splits import draw_stratified_subset
from vitascope.data.statistics import compute_data_hash
from vitascope.errors import UserError, format_count
from vitascope.evaluation.eval_data import load_run_split
from vitascope.evaluation.prediction import Prediction, Predictions, read_image_files
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.run.files import make_folder, write_atomically


@dataclass(frozen=True)
class ImageFeatures:
    """For each image: its file, its folder, its prediction and its features."""

    files: list[str]
    folder_names: list[str]
    images: UInt8Images
    predictions: Predictions | None  # None: the model has no classifier
    features: Tensor
    unreadable_files: list[str]  # files that could not be read

    def save(self, path: Path) -> Path:
        """Write an .npz or .parquet file: features, file, folder and, with a classifier, predicted and probability."""
        check_feature_file_suffix(path)
        columns: dict[str, list[str] | list[float]] = {"file": self.files, "folder": self.folder_names}
        if self.predictions is not None:
            columns |= {
                "predicted": self.predictions.labels,
                "probability": [item.probability for item in self.predictions],
            }
        content = FEATURE_ENCODERS[path.suffix](columns, self.features.numpy())
        make_folder(path.parent)
        write_atomically(path, content)
        return path


def check_feature_file_suffix(path: Path) -> None:
    if path.suffix not in FEATURE_ENCODERS:
        raise UserError(
            f"Features cannot be written as '{path.name}'. Choose an ending: {', '.join(FEATURE_ENCODERS)}."
        )


def compute_image_features(model: TrainedTransformer, paths: list[Path]) -> ImageFeatures:
    """Compute the features of every image in the folders, preprocessed as in training."""
    pictures = read_image_files(paths, model.info.stored)
    files = pictures.files or []
    folders = [Path(name).resolve().parent.name for name in files]
    said, features = model.predict_with_features(pictures)
    return ImageFeatures(files, folders, pictures.images, said, features, pictures.unreadable_files)


def _encode_npz(columns: dict[str, list[str] | list[float]], features: NDArray) -> bytes:
    arrays = {name: np.array(values) for name, values in columns.items()} | {"features": features}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:  # not np.savez, whose own argument is called file
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return whole.getvalue()


def _encode_parquet(columns: dict[str, list[str] | list[float]], features: NDArray) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(features.reshape(-1))
    table = columns | {"features": pa.FixedSizeListArray.from_arrays(flat, features.shape[1])}
    whole = io.BytesIO()
    pq.write_table(pa.table(table), whole)
    return whole.getvalue()


FEATURE_ENCODERS = {".npz": _encode_npz, ".parquet": _encode_parquet}


MAX_SEARCHED_IMAGES = 10_000  # training images to search; more would take minutes on a laptop
CACHE_FILE = "features.npz"


@dataclass(frozen=True)
class Neighbours:
    """The query image, its prediction, and the most similar images with their similarity (−1 to 1)."""

    query_image: Tensor
    prediction: Prediction | None  # None: the model has no classifier
    searched_description: str
    nearest_samples: Split
    labels: list[str]
    similarities: list[float]
    identical: list[bool]  # whether it has the query's pixels
    unreadable_files: list[str]  # files of the searched folder that could not be read


def find_similar_images(
    model: TrainedTransformer, image_path: Path, search_folder: Path | None, max_neighbours: int
) -> Neighbours:
    """Search by the cosine between features, in the run's training images or in a folder."""
    if image_path.is_dir():
        raise UserError(f"{image_path} is a folder. Give one image. To search a folder, add --among FOLDER.")
    pictures = read_image_files([image_path], model.info.stored)
    asked, query = model.predict_with_features(pictures)
    query = F.normalize(query, dim=1)
    broken: list[str] = []
    if search_folder is None:
        split, features = _load_training_features(model)
        labels = [model.classes[number] for number in split.labels.tolist()]
    else:
        there = compute_image_features(model, [search_folder])
        split = Split(there.images, torch.zeros(len(there.files), dtype=torch.long), there.files)
        broken = there.unreadable_files
        features, labels = there.features, there.folder_names
    closeness = F.normalize(features, dim=1) @ query[0]
    itself = torch.tensor(
        [Path(name).resolve() == image_path.resolve() for name in split.file_paths or []], dtype=torch.bool
    )
    closeness[itself.nonzero()] = -torch.inf  # exclude the query image
    others = len(split) - int(itself.sum())
    noun = ("other " if itself.any() else "") + ("image" if search_folder else "training image")
    alike = closeness.topk(min(max_neighbours, others))
    found = split.select(alike.indices)
    return Neighbours(
        query_image=pictures.images[0],
        prediction=None if asked is None else asked[0],
        searched_description=format_count(others, noun)
        + (f" in {search_folder.name or search_folder}" if search_folder else ""),
        nearest_samples=found,
        labels=[labels[number] for number in alike.indices.tolist()],
        similarities=alike.values.tolist(),
        identical=(found.images == pictures.images[0]).flatten(1).all(1).tolist(),
        unreadable_files=broken,
    )


def _load_training_features(model: TrainedTransformer) -> tuple[Split, Tensor]:
    """Return the training images and their features; the features are cached in the run."""
    split = load_run_split(model.run, model.info, "train")
    if split is None:
        raise UserError("The run has no training images to search.")
    split = split.select(draw_stratified_subset(split.labels, min(1.0, MAX_SEARCHED_IMAGES / len(split)), seed=0))
    path = model.run.get_path(CACHE_FILE)
    identity = _hash_weights_and_images(model, split)
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                if str(file["identity"]) == identity:
                    return split, torch.from_numpy(file["features"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass  # a damaged cache is computed again
    features = model.compute_stored_features(split.images)
    _cache_features(path, features, identity)
    return split, features


def _hash_weights_and_images(model: TrainedTransformer, samples: Split) -> str:
    """Return a hash of the weights and images that the features depend on."""
    weights = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        weights.update(tensor.cpu().numpy().tobytes())
    return f"{weights.hexdigest()} {compute_data_hash(samples.images, samples.labels)}"


def _cache_features(path: Path, features: Tensor, cache_key: str) -> None:
    """Cache the features; a run folder without write access is no error."""
    file = io.BytesIO()
    np.savez(file, features=features.numpy(), identity=np.array(cache_key))
    with suppress(UserError):
        write_atomically(path, file.getvalue())
