"""Find the images whose features are most similar to those of a query image."""

import hashlib
import io
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.source import Split
from vitascope.data.split import stratified_part
from vitascope.data.statistics import data_hash
from vitascope.errors import UserError, format_count
from vitascope.evaluation.choosing import own_images
from vitascope.evaluation.embedding import embed
from vitascope.evaluation.prediction import Prediction
from vitascope.evaluation.reading import read_files
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.run.files import write_whole

MOST = 10_000  # training images to search; more would take minutes on a laptop
CACHE = "features.npz"


@dataclass(frozen=True)
class Neighbours:
    """The query image, its prediction, and the most similar images with their similarity (−1 to 1)."""

    image: Tensor
    said: Prediction | None  # None: the model has no classifier
    searched: str
    found: Split
    labels: list[str]
    similarity: list[float]
    identical: list[bool]  # whether it has the query's pixels
    broken: list[str]  # files of the searched folder that could not be read


def similar(model: TrainedTransformer, image: Path, among: Path | None, most: int) -> Neighbours:
    """Search by the cosine between features, in the run's training images or in a folder."""
    if image.is_dir():
        raise UserError(f"{image} is a folder. Give one image. To search a folder, add --among FOLDER.")
    pictures = read_files([image], model.facts.stored)
    asked, query = model.predict_with_features(pictures)
    query = F.normalize(query, dim=1)
    broken: list[str] = []
    if among is None:
        split, features = _training_images(model)
        labels = [model.classes[number] for number in split.labels.tolist()]
    else:
        there = embed(model, [among])
        split = Split(there.images, torch.zeros(len(there.files), dtype=torch.long), there.files)
        broken = there.broken
        features, labels = there.features, there.folders
    closeness = F.normalize(features, dim=1) @ query[0]
    itself = torch.tensor([Path(name).resolve() == image.resolve() for name in split.names or []], dtype=torch.bool)
    closeness[itself.nonzero()] = -torch.inf  # exclude the query image
    others = len(split) - int(itself.sum())
    noun = ("other " if itself.any() else "") + ("image" if among else "training image")
    alike = closeness.topk(min(most, others))
    found = split.part(alike.indices)
    return Neighbours(
        image=pictures.images[0],
        said=None if asked is None else asked[0],
        searched=format_count(others, noun) + (f" in {among.name or among}" if among else ""),
        found=found,
        labels=[labels[number] for number in alike.indices.tolist()],
        similarity=alike.values.tolist(),
        identical=(found.images == pictures.images[0]).flatten(1).all(1).tolist(),
        broken=broken,
    )


def _training_images(model: TrainedTransformer) -> tuple[Split, Tensor]:
    """Return the training images and their features; the features are cached in the run."""
    split = own_images(model.run, model.facts, "train")
    if split is None:
        raise UserError("The run has no training images to search.")
    split = split.part(stratified_part(split.labels, min(1.0, MOST / len(split)), seed=0))
    path = model.run.file(CACHE)
    identity = _identity(model, split)
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                if str(file["identity"]) == identity:
                    return split, torch.from_numpy(file["features"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass  # a damaged cache is computed again
    features = model.stored_features(split.images)
    _keep(path, features, identity)
    return split, features


def _identity(model: TrainedTransformer, split: Split) -> str:
    """Return a hash of the weights and images that the features depend on."""
    weights = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        weights.update(tensor.cpu().numpy().tobytes())
    return f"{weights.hexdigest()} {data_hash(split.images, split.labels)}"


def _keep(path: Path, features: Tensor, identity: str) -> None:
    """Cache the features; a run folder without write access is no error."""
    file = io.BytesIO()
    np.savez(file, features=features.numpy(), identity=np.array(identity))
    with suppress(UserError):
        write_whole(path, file.getvalue())
