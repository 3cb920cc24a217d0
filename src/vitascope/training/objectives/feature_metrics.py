"""Measure features during training without labels: k-NN, linear probe, and their spread.

Labels are used only for evaluation: no gradient of the probe reaches the model.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.dataset import Dataset, Labels
from vitascope.data.open_data import draw_stratified_subset_indices
from vitascope.inference.scoring import compute_outputs_in_eval_mode
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Features, Logits

if TYPE_CHECKING:
    from vitascope.training.state import TrainState

MAX_TRAIN_IMAGES = 10_000  # training images for the evaluation during training
NUM_NEIGHBOURS, KNN_TEMPERATURE = 20, 0.07  # as in Wu et al. 2018 and DINO's eval_knn.py
PROBE_WEIGHT_DECAY, PROBE_MAX_STEPS = 1e-4, 100  # L2 penalty of the linear probe's weights; L-BFGS iterations
KNN_CHUNK_SIZE = 2000  # images whose neighbours are searched at once


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier on features: logits = features · weightᵀ + bias."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Features) -> Logits:
        return F.linear(features, self.weight, self.bias)


class LBFGS(torch.optim.LBFGS):
    """PyTorch's, without the decorator that imports the compiler `torch._dynamo` (seconds) before the first step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)


def predict_classes_by_knn(
    train_features: Features,
    train_labels: Labels,
    query_features: Tensor,
    num_classes: int,
    num_neighbours: int = NUM_NEIGHBOURS,
) -> Tensor:
    """Predict the class of each query by a vote of its nearest training images, weighted by cosine similarity."""
    train_features, predictions = F.normalize(train_features, dim=1), []
    for part in F.normalize(query_features, dim=1).split(KNN_CHUNK_SIZE):
        nearest = (part @ train_features.T).topk(min(num_neighbours, len(train_features)), dim=1)
        votes = torch.zeros(len(part), num_classes, device=part.device, dtype=part.dtype)
        weights = ((nearest.values - 1) / KNN_TEMPERATURE).exp()  # shifted by 1 against overflow; votes stay the same
        predictions.append(votes.scatter_add(1, train_labels[nearest.indices], weights).argmax(1))
    return torch.cat(predictions)


def fit_linear_probe(
    features: Features, labels: Labels, num_classes: int, l2_penalty: float = PROBE_WEIGHT_DECAY
) -> LinearProbe:
    """Fit logistic regression by L-BFGS on standardised features; the standardisation is folded into the weights.

    `l2_penalty`: factor of the sum of the squared weights, which is added to the mean loss."""
    mean, deviation = features.mean(0), features.std(0, correction=0)
    deviation = torch.maximum(deviation, 1e-4 * mean.abs() + 1e-6)  # constant features are not scaled up
    inputs = (features - mean) / deviation
    weight = torch.zeros(num_classes, features.shape[1], device=features.device, requires_grad=True)
    bias = torch.zeros(num_classes, device=features.device, requires_grad=True)
    optimizer = LBFGS([weight, bias], max_iter=PROBE_MAX_STEPS, line_search_fn="strong_wolfe")

    def closure() -> float:
        weight.grad = bias.grad = None
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(inputs, weight, bias), labels) + l2_penalty * weight.square().sum()
            loss.backward()
        return loss.item()

    optimizer.step(closure)
    folded_weight = weight.detach().double() / deviation.double()
    folded_bias = bias.detach().double() - folded_weight @ mean.double()
    return LinearProbe(folded_weight.to(features.dtype), folded_bias.to(features.dtype))


def compute_rms_spread_of_unit_features(features: Features) -> float:
    """Return how different the features of different images are: 0 if identical, near 1 if in all directions.

    This is the square root of the summed variance over images, of features normalised to length 1."""
    return F.normalize(features.float(), dim=1).var(0, correction=0).sum().sqrt().item()


class FeatureEvaluator:
    """Evaluate the features every few epochs by k-NN and a linear probe.

    The probe becomes the model's classifier. After the last epoch it is fitted to all training images."""

    def __init__(self, state: "TrainState") -> None:
        self.state, data = state, state.data
        fraction = min(1.0, MAX_TRAIN_IMAGES / len(data.train))
        self.train_subset = data.train.select(draw_stratified_subset_indices(data.train.labels, fraction, seed=0))
        for model in (state.model, state.eval_model):
            if isinstance(model, VisionTransformer):
                model.head.requires_grad_(False)

    def evaluate_features_and_set_probe_heads(self, epoch: int) -> dict[str, float]:
        """Return feature_spread, knn_accuracy and val_accuracy; empty in epochs without evaluation."""
        config = self.state.recipe.train
        if epoch % config.probe_interval and epoch != config.epochs:
            return {}
        features = compute_features(self.state, self.train_subset)
        row = {"feature_spread": compute_rms_spread_of_unit_features(features)}
        labels, classes = self.train_subset.labels.to(features.device), len(self.state.data.classes)
        probe = fit_linear_probe(features, labels, classes)
        self._copy_probe_to_heads(probe)
        validation = self.state.data.validation
        if validation is not None:
            val_features, val_labels = (
                compute_features(self.state, validation),
                validation.labels.to(features.device),
            )
            row["knn_accuracy"] = _compute_accuracy(
                predict_classes_by_knn(features, labels, val_features, classes) == val_labels
            )
            row["val_accuracy"] = _compute_accuracy(probe(val_features).argmax(1) == val_labels)
        if epoch == config.epochs and len(self.train_subset) < len(self.state.data.train):
            train = self.state.data.train
            all_features = compute_features(self.state, train)
            self._copy_probe_to_heads(fit_linear_probe(all_features, train.labels.to(all_features.device), classes))
        return row

    @torch.no_grad()
    def _copy_probe_to_heads(self, probe: LinearProbe) -> None:
        """Copy the probe into the model and its EMA, so that averaging does not change it."""
        for model in (self.state.model, self.state.eval_model):
            head = model.head
            if isinstance(head, nn.Linear):
                head.weight.copy_(probe.weight)
                head.bias.copy_(probe.bias)


def compute_features(state: "TrainState", split: Dataset) -> Features:
    """Compute the pooled features of the evaluated model for all images of the split."""
    model, hardware = state.eval_model, state.hardware
    features = compute_outputs_in_eval_mode(
        model, model.compute_pooled_features, split, state.data.preprocessing, hardware
    )  # pyright: ignore
    return features.to(hardware.device)


def _compute_accuracy(is_correct: Tensor) -> float:
    return is_correct.float().mean().item()
