"""`timm:NAME`, `hf:REPO`, a file or a folder -> a plain ViT's weights by timm's names, with all that is known of it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.weights.facts import ModelFacts
from vitascope.weights.files import ENDINGS, read_tensors
from vitascope.weights.folders import read_folder
from vitascope.weights.known import Known, class_names, imagenet_normalisation
from vitascope.weights.names import to_timm_names
from vitascope.weights.online import fetch_repository, fetch_timm, known_of_timm
from vitascope.weights.sizes import check_fits, config_of

ONLINE = ("timm:", "hf:")
HOW = "Weights are timm:NAME, hf:REPO, a file (.safetensors, .pth), a folder with config.json, or a run."


@dataclass(frozen=True)
class Pretrained:
    """A model that somebody trained: weights in float32, sizes, classes, preparation; and what had to be assumed."""

    name: str
    library: str  # whose names the weights had
    facts: ModelFacts
    weights: dict[str, Tensor]
    assumed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # weights that our model has no place for
    notes: list[str] = field(default_factory=list)

    def model(self) -> VisionTransformer:
        """Ready to answer."""
        built = VisionTransformer(self.facts.model)
        built.load_state_dict(self.weights)
        return built.eval()


def open_weights(word: str, *, num_heads: int | None = None) -> Pretrained:
    """By the word that users type. `num_heads` where the weights' own width / 64 would be wrong."""
    if word.startswith("timm:"):
        return _from_timm(word)
    if word.startswith("hf:"):
        return _from_folder(fetch_repository(word.removeprefix("hf:")), word, num_heads)
    path = Path(word).expanduser()
    if path.is_dir():
        return _from_folder(path, word, num_heads)
    if path.suffix in ENDINGS:
        return named(read_tensors(path), str(path), Known({"num_heads": num_heads} if num_heads else {}))
    if path.exists():
        raise UserError(f"{word} is no weights file: it should end in {', '.join(ENDINGS)}. {HOW}")
    raise UserError(f"There are no weights '{word}'. {HOW}")


def named(tensors: dict[str, Tensor], name: str, known: Known | None = None) -> Pretrained:
    """Any library's state dict -> ours, told what is `known` besides (from a config.json, or from the user)."""
    known = known or Known()
    renamed = to_timm_names(tensors, name)
    settings = dict(known.settings)
    if renamed.weights.get("head.weight") is None:
        settings.pop("num_classes", None)
    config, assumed = config_of(renamed.weights, renamed.library, name, **settings)
    facts = facts_for(config, known, assumed)
    return Pretrained(
        name, known.library or renamed.library, facts, renamed.weights, assumed, renamed.dropped, renamed.notes
    )


def facts_for(config: ModelConfig, known: Known, assumed: list[str]) -> ModelFacts:
    mean, std = known.mean, known.std
    if mean is None or std is None:
        mean, std = imagenet_normalisation(config.in_chans)
        assumed.append(f"images normalised by mean {_round(mean)}, deviation {_round(std)}")
    classes = known.classes if known.classes and len(known.classes) == config.num_classes else None
    if classes is None:
        classes = class_names(config.num_classes)
        if config.num_classes == 1000:
            assumed.append("1000 classes: ImageNet's names")
    stored = (config.in_chans, *config.image_shape)
    return ModelFacts(config, classes, Preparation(config.image_shape, tuple(mean), tuple(std)), stored)


def _from_folder(path: Path, word: str, num_heads: int | None) -> Pretrained:
    found = read_folder(path)
    if isinstance(found.known, ModelFacts):
        check_fits(found.tensors, found.known.model, str(path))
        return Pretrained(word, "vitascope", found.known, found.tensors)
    known = replace(found.known, settings=found.known.settings | ({"num_heads": num_heads} if num_heads else {}))
    return replace(named(found.tensors, str(path), known), name=word)


def _from_timm(word: str) -> Pretrained:
    """Checked by an image's answer: what looks like a plain ViT but computes something else is refused."""
    import torch

    theirs = fetch_timm(word.removeprefix("timm:"))
    found = named(theirs.state_dict(), word, known_of_timm(theirs))
    images = torch.randn(1, *found.facts.stored, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, told = theirs.eval()(images), found.model()(images)
    if wanted.shape != told.shape or (wanted - told).abs().max() > 1e-3 * wanted.abs().max().clamp(min=1e-6):
        raise UserError(f"{word} is not a plain ViT: with its weights, ours answers otherwise.")
    return found


def _round(values: Any) -> str:
    return "/".join(f"{value:.3g}" for value in values)
