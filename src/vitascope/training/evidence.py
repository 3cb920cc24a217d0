"""Features -> what can be read off them while nobody uses labels to learn: neighbours, a linear probe, their spread.

Labels are used to look, never to learn from: the probe reads the features, and nothing flows back into the model.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.source import Labels, Split
from vitascope.data.split import stratified_part
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Features, Logits
from vitascope.training.objective import Learning
from vitascope.training.scoring import answers

MOST = 10_000  # training images that are looked at on the way
NEIGHBOURS, TEMPERATURE = 20, 0.07  # as in Wu et al. 2018 and DINO's eval_knn.py
DECAY, STEPS = 1e-4, 100  # of the linear probe: its weights' squares beside the mean cross-entropy, and its most steps
CHUNK = 2000  # images whose neighbours are searched at once


@dataclass(frozen=True)
class Probe:
    """A linear classifier on features: logits = features · weightᵀ + bias."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Features) -> Logits:
        return F.linear(features, self.weight, self.bias)


class LBFGS(torch.optim.LBFGS):
    """PyTorch's, without the decorator that imports the compiler `torch._dynamo` (seconds) before the first step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)


def nearest_answers(known: Features, labels: Labels, asked: Tensor, classes: int, most: int = NEIGHBOURS) -> Tensor:
    """For each asked image the class that its `most` nearest known images vote for, by cosine, the nearer the more."""
    known, found = F.normalize(known, dim=1), []
    for part in F.normalize(asked, dim=1).split(CHUNK):
        near = (part @ known.T).topk(min(most, len(known)), dim=1)
        votes = torch.zeros(len(part), classes, device=part.device, dtype=part.dtype)
        weights = ((near.values - 1) / TEMPERATURE).exp()  # exp(1/0.07) is a million: shifted, which changes no vote
        found.append(votes.scatter_add(1, labels[near.indices], weights).argmax(1))
    return torch.cat(found)


def fit_probe(features: Features, labels: Labels, classes: int) -> Probe:
    """Logistic regression by L-BFGS on standardised features; the standardisation is folded into the weights."""
    mean, deviation = features.mean(0), features.std(0, correction=0)
    deviation = torch.maximum(deviation, 1e-4 * mean.abs() + 1e-6)  # what never changes stays as it is
    inputs = (features - mean) / deviation
    weight = torch.zeros(classes, features.shape[1], device=features.device, requires_grad=True)
    bias = torch.zeros(classes, device=features.device, requires_grad=True)
    optimizer = LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> float:
        weight.grad = bias.grad = None
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(inputs, weight, bias), labels) + DECAY * weight.square().sum()
            loss.backward()
        return loss.item()

    optimizer.step(closure)
    folded = weight.detach().double() / deviation.double()
    moved = bias.detach().double() - folded @ mean.double()
    return Probe(folded.to(features.dtype), moved.to(features.dtype))


def spread(features: Features) -> float:
    """How different the features of different images are: 1 where they point everywhere, 0 where all are the same.

    The root of the summed variance over images of features of length 1."""
    return F.normalize(features.float(), dim=1).var(0, correction=0).sum().sqrt().item()


class Evidence:
    """Looks at the features every few epochs, and leaves the linear probe in the model as its classifier: at the end
    one that is fitted to all training images, so that a finished run answers like any other."""

    def __init__(self, learning: Learning) -> None:
        self.learning, data = learning, learning.data
        share = min(1.0, MOST / len(data.train))
        self.some = data.train.part(stratified_part(data.train.labels, share, seed=0))
        for model in (learning.model, learning.answering):
            if isinstance(model, VisionTransformer):
                model.head.requires_grad_(False)

    def look(self, epoch: int) -> dict[str, float]:
        config = self.learning.recipe.train
        if epoch % config.watched_every and epoch != config.epochs:
            return {}
        known = features_of(self.learning, self.some)
        row = {"feature_spread": spread(known)}
        labels, classes = self.some.labels.to(known.device), len(self.learning.data.classes)
        probe = fit_probe(known, labels, classes)
        self._put_in(probe)
        validation = self.learning.data.validation
        if validation is not None:
            asked, right = features_of(self.learning, validation), validation.labels.to(known.device)
            row["knn_accuracy"] = _share(nearest_answers(known, labels, asked, classes) == right)
            row["val_accuracy"] = _share(probe(asked).argmax(1) == right)
        if epoch == config.epochs and len(self.some) < len(self.learning.data.train):
            train = self.learning.data.train
            every = features_of(self.learning, train)
            self._put_in(fit_probe(every, train.labels.to(every.device), classes))
        return row

    @torch.no_grad()
    def _put_in(self, probe: Probe) -> None:
        """Into the model and its average alike, so that averaging leaves it as it is."""
        for model in (self.learning.model, self.learning.answering):
            head = model.head
            if isinstance(head, nn.Linear):
                head.weight.copy_(probe.weight)
                head.bias.copy_(probe.bias)


def features_of(learning: Learning, split: Split) -> Features:
    model, hardware = learning.answering, learning.hardware
    found = answers(model, model.pooled, split.images, learning.data.preparation, hardware)  # pyright: ignore
    return found.to(hardware.device)


def _share(right: Tensor) -> float:
    return right.float().mean().item()
