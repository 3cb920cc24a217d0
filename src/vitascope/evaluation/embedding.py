"""Compute and save features of images, and find the images with the most similar features."""

import hashlib
import io
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.dataset import Dataset, ImageFiles, MemoryDataset, UInt8Images
from vitascope.data.open_data import draw_stratified_subset_indices
from vitascope.errors import UserError, format_count
from vitascope.inference.classifier import Classifier
from vitascope.inference.prediction import (
    LoadedImages,
    Prediction,
    Predictions,
    build_predictions,
    read_image_files_and_folders,
)
from vitascope.run.files import make_folder, write_atomically
from vitascope.run.images import load_run_split_if_any
from vitascope.shapes import Features

FeatureColumns = dict[str, list[str] | list[float]]  # column name -> one value per image


@dataclass(frozen=True)
class ImageFeatures:
    """For each image: its file, its folder, its prediction and its features."""

    files: list[str]
    folder_names: list[str]
    images: UInt8Images
    predictions: Predictions | None  # None: the model has no classifier
    features: Features
    unreadable_files: list[str]  # files that could not be read

    def save(self, path: Path) -> Path:
        """Write an .npz or .parquet file: features, file, folder and, with a classifier, predicted and probability."""
        check_feature_file_suffix(path)
        columns: FeatureColumns = {"file": self.files, "folder": self.folder_names}
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


def compute_features_of_image_files(model: Classifier, paths: list[Path]) -> ImageFeatures:
    """Compute the features of every image in the folders, preprocessed as in training."""
    loaded = read_image_files_and_folders(paths, model.stored_shape)
    files = loaded.files or []
    folders = [Path(name).resolve().parent.name for name in files]
    predictions, features = predict_with_features(model, loaded)
    return ImageFeatures(files, folders, loaded.images, predictions, features, loaded.unreadable_files)


class PredictionsWithFeatures(NamedTuple):
    predictions: Predictions | None  # None: the model has no classifier
    features: Features


def predict_with_features(model: Classifier, loaded_images: LoadedImages) -> PredictionsWithFeatures:
    """Return predictions, as of `predict`, and features from one forward pass."""
    features = model.compute_features_of_stored_images(loaded_images.images)
    if not model.classes:
        return PredictionsWithFeatures(None, features)
    with torch.no_grad():
        logits = model.head(features.to(model.device)).cpu()
    run_temperature = model.find_temperature()
    temperature = run_temperature.value if run_temperature else 1.0
    predictions = build_predictions(logits, loaded_images, model.classes, temperature=temperature)
    return PredictionsWithFeatures(predictions, features)


def _encode_npz(columns: FeatureColumns, features: NDArray) -> bytes:
    arrays = {name: np.array(values) for name, values in columns.items()} | {"features": features}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # not np.savez, whose own argument is called file
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getvalue()


def _encode_parquet(columns: FeatureColumns, features: NDArray) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat_features = pa.array(features.reshape(-1))
    table_columns = columns | {"features": pa.FixedSizeListArray.from_arrays(flat_features, features.shape[1])}
    buffer = io.BytesIO()
    pq.write_table(pa.table(table_columns), buffer)
    return buffer.getvalue()


FEATURE_ENCODERS = {".npz": _encode_npz, ".parquet": _encode_parquet}


MAX_SEARCHED_IMAGES = 10_000  # training images to search; more would take minutes on a laptop
CACHE_FILE = "features.npz"


@dataclass(frozen=True)
class Neighbours:
    """The query image, its prediction, and the most similar images with their similarity (−1 to 1)."""

    query_image: Tensor
    prediction: Prediction | None  # None: the model has no classifier
    searched_description: str
    nearest_samples: Dataset
    labels: list[str]
    similarities: list[float]
    identical: list[bool]  # whether it has the query's pixels
    unreadable_files: list[str]  # files of the searched folder that could not be read


def find_similar_images(
    model: Classifier, image_path: Path, search_folder: Path | None, max_neighbours: int
) -> Neighbours:
    """Search by the cosine between features, in the run's training images or in a folder."""
    if image_path.is_dir():
        raise UserError(f"{image_path} is a folder. Give one image. To search a folder, add --among FOLDER.")
    loaded = read_image_files_and_folders([image_path], model.stored_shape)
    predictions, query_features = predict_with_features(model, loaded)
    query_features = F.normalize(query_features, dim=1)
    unreadable_files: list[str] = []
    if search_folder is None:
        searched, features = _load_or_compute_training_features(model)
        labels = [model.classes[index] for index in searched.labels.tolist()]
    else:
        folder_features = compute_features_of_image_files(model, [search_folder])
        paths = folder_features.files
        files = ImageFiles(paths, [0] * len(paths), folder="")
        searched = MemoryDataset(folder_features.images, torch.zeros(len(paths), dtype=torch.long), files=files)
        unreadable_files = folder_features.unreadable_files
        features, labels = folder_features.features, folder_features.folder_names
    similarities = F.normalize(features, dim=1) @ query_features[0]
    is_query = torch.tensor(
        [Path(name).resolve() == image_path.resolve() for name in searched.file_paths or []], dtype=torch.bool
    )
    similarities[is_query.nonzero()] = -torch.inf  # exclude the query image
    num_others = len(searched) - int(is_query.sum())
    noun = ("other " if is_query.any() else "") + ("image" if search_folder else "training image")
    nearest = similarities.topk(min(max_neighbours, num_others))
    nearest_samples = searched.select(nearest.indices)
    return Neighbours(
        query_image=loaded.images[0],
        prediction=None if predictions is None else predictions[0],
        searched_description=format_count(num_others, noun)
        + (f" in {search_folder.name or search_folder}" if search_folder else ""),
        nearest_samples=nearest_samples,
        labels=[labels[index] for index in nearest.indices.tolist()],
        similarities=nearest.values.tolist(),
        identical=(nearest_samples.images == loaded.images[0]).flatten(1).all(1).tolist(),
        unreadable_files=unreadable_files,
    )


class SampleFeatures(NamedTuple):
    samples: Dataset
    features: Features


def _load_or_compute_training_features(model: Classifier) -> SampleFeatures:
    """Return the training images and their features; the features are cached in the run."""
    samples = load_run_split_if_any(model.run, model.info, "train", "Name the images to search: --among FOLDER.")
    if samples is None:
        raise UserError("The run has no training images to search.")
    samples = samples.select(
        draw_stratified_subset_indices(samples.labels, min(1.0, MAX_SEARCHED_IMAGES / len(samples)), seed=0)
    )
    path = model.run.get_path(CACHE_FILE)
    identity = _hash_weights_and_samples(model, samples)
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                if str(file["identity"]) == identity:
                    return SampleFeatures(samples, torch.from_numpy(file["features"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass  # a damaged cache is computed again
    features = model.compute_features_of_stored_images(samples.images)
    _try_to_cache_features(path, features, identity)
    return SampleFeatures(samples, features)


def _hash_weights_and_samples(model: Classifier, samples: Dataset) -> str:
    """Return a hash of the weights and images that the features depend on."""
    weights = hashlib.blake2b(digest_size=8)
    for tensor in model.model.state_dict().values():
        weights.update(tensor.cpu().numpy().tobytes())
    return f"{weights.hexdigest()} {samples.fingerprint()}"


def _try_to_cache_features(path: Path, features: Features, cache_key: str) -> None:
    """Cache the features; a run folder without write access is no error."""
    file = io.BytesIO()
    np.savez(file, features=features.numpy(), identity=np.array(cache_key))
    with suppress(UserError):
        write_atomically(path, file.getvalue())
