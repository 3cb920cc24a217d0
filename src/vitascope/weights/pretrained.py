"""Open the weights of a plain ViT from `timm:NAME`, `hf:REPO`, a file or a folder, with timm's parameter names."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig, Size, check_size
from vitascope.model.vit import VisionTransformer
from vitascope.weights.building import fill_timm
from vitascope.weights.facts import ModelFacts
from vitascope.weights.files import ENDINGS, read_tensors
from vitascope.weights.folders import read_folder, readable
from vitascope.weights.known import Known, class_names, imagenet_normalisation, unique
from vitascope.weights.names import to_timm_names
from vitascope.weights.online import fetch_repository, fetch_timm, known_of_timm
from vitascope.weights.sizes import check_fits, config_of

ONLINE = ("timm:", "hf:")
SAME = 1e-4  # relative to the largest logit: rounding is far below, another activation above
IMAGENET_CLASSES = "class names of ImageNet, because there are 1000 classes"
HOW = "Use timm:NAME, hf:REPO, a file (.safetensors, .pth), a folder with config.json, or a run."


@dataclass(frozen=True)
class Pretrained:
    """A trained model: weights in float32, sizes, classes, preparation, and the assumptions made."""

    name: str
    library: str  # whose names the weights had
    facts: ModelFacts
    weights: dict[str, Tensor]
    assumed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # weights that our model has no place for
    notes: list[str] = field(default_factory=list)

    @property
    def told(self) -> list[str]:
        """Lines for the user: assumptions, removed weights and notes."""
        left_out = [f"removed: {', '.join(self.dropped)}"] if self.dropped else []
        return [f"assumed: {words}" for words in self.assumed] + left_out + [f"note: {words}" for words in self.notes]

    def model(self) -> VisionTransformer:
        """The model with these weights, in eval mode."""
        return ready(self.facts.model, self.weights)


def ready(config: ModelConfig, weights: dict[str, Tensor]) -> VisionTransformer:
    built = VisionTransformer(config)
    built.load_state_dict(weights)
    return built.eval()


def open_weights(word: str, *, num_heads: int | None = None, img_size: Size | None = None) -> Pretrained:
    """Open what `weights=` accepts. `num_heads`, `img_size`: used if the weights do not define them."""
    if img_size is not None:
        img_size = check_size("img_size", img_size)
    given = Given(num_heads, img_size)
    if word.startswith("timm:"):
        return _from_timm(word, given)
    if word.startswith("hf:"):
        return _from_folder(fetch_repository(word.removeprefix("hf:")), word, given)
    path = Path(word).expanduser()
    if path.is_dir():
        return _from_folder(path, word, given)
    if path.suffix in ENDINGS and readable(path.parent):
        return _beside_config(path, word, given)
    if path.suffix in ENDINGS:
        tensors, beside = read_tensors(path)
        return named(tensors, str(path), given.added_to(Known(), word), beside=beside, asked_size=img_size)
    if path.exists():
        raise UserError(f"{word} is not a weights file: its name must end in {', '.join(ENDINGS)}. {HOW}")
    raise UserError(f"There are no weights '{word}'. {HOW}")


@dataclass(frozen=True)
class Given:
    """Settings of the weights that the user gives."""

    num_heads: int | None = None
    img_size: Size | None = None  # used only if nothing else defines it

    def added_to(self, known: Known, word: str) -> Known:
        """Add the user's settings to `known`. A contradiction with config.json is an error."""
        if self.num_heads is None:
            return known
        self.check(known.settings.get("num_heads", self.num_heads), word)
        return replace(known, settings=known.settings | {"num_heads": self.num_heads})

    def check(self, heads: int, word: str) -> None:
        if self.num_heads not in (None, heads):
            raise UserError(
                f"{word} has num_heads={heads}, so num_heads={self.num_heads} would be a different model. "
                "Leave num_heads out."
            )


def named(
    tensors: dict[str, Tensor],
    name: str,
    known: Known | None = None,
    *,
    beside: list[str] | None = None,
    asked_size: Size | None = None,
) -> Pretrained:
    """Convert any library's state dict. `known`: further facts, from config.json or from the user."""
    known = known or Known()
    renamed = to_timm_names(tensors, name)
    settings = renamed.settings | known.settings
    config, assumed = config_of(renamed.weights, renamed.library, name, asked_size=asked_size, **settings)
    facts, dropped = facts_for(config, known, assumed), [*(beside or []), *renamed.dropped]
    return Pretrained(name, known.library or renamed.library, facts, renamed.weights, assumed, dropped, renamed.notes)


def facts_for(config: ModelConfig, known: Known, assumed: list[str]) -> ModelFacts:
    mean, std = known.mean, known.std
    if mean is None or std is None or {len(mean), len(std)} != {config.in_chans}:
        mean, std = imagenet_normalisation(config.in_chans)
        assumed.append(f"images normalised with mean {_round(mean)}, standard deviation {_round(std)}")
    classes = unique(known.classes) if known.classes and len(known.classes) == config.num_classes else None
    if classes is None:
        classes = class_names(config.num_classes)
        if config.num_classes == 1000:
            assumed.append(IMAGENET_CLASSES)
    stored = (config.in_chans, *config.image_shape)
    return ModelFacts(config, classes, Preparation(config.image_shape, tuple(mean), tuple(std)), stored)


def _from_folder(path: Path, word: str, given: Given, file: Path | None = None) -> Pretrained:
    found = read_folder(path, file)
    where = str(file or path)
    if isinstance(found.known, ModelFacts):
        given.check(found.known.model.num_heads, word)
        check_fits(found.tensors, found.known.model, where)
        return Pretrained(word, "vitascope", found.known, found.tensors, dropped=found.beside)
    known = given.added_to(found.known, word)
    made = replace(named(found.tensors, where, known, beside=found.beside, asked_size=given.img_size), name=word)
    if found.theirs is not None:
        check_answer(made, fill_timm(found.theirs, made.weights, where))
    return made


def _beside_config(file: Path, word: str, given: Given) -> Pretrained:
    """A weights file in a folder with config.json, such as best.safetensors of a run."""
    config = file.parent / "config.json"
    try:
        found = _from_folder(file.parent, word, given, file)
    except UserError as error:
        hint = f"It was read with {config}. If that belongs to another model, move the weights to their own folder."
        raise UserError(f"{error} {hint}") from error
    return replace(found, notes=[*found.notes, f"sizes, classes and normalisation are from {config}"])


def _from_timm(word: str, given: Given) -> Pretrained:
    theirs = fetch_timm(word.removeprefix("timm:"))
    found = named(theirs.state_dict(), word, given.added_to(known_of_timm(theirs), word))
    check_answer(found, theirs)
    return found


def check_answer(found: Pretrained, theirs: Any) -> None:
    """Compare the outputs for one image, and raise an error if the model is not a plain ViT."""
    images = torch.randn(1, *found.facts.stored, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, told = theirs.eval()(images), found.model()(images)
    if wanted.shape != told.shape or not (wanted - told).abs().max() <= SAME * wanted.abs().max().clamp(min=1e-6):
        raise UserError(
            f"{found.name} is not a plain ViT: with the same weights, Vitascope's model gives a different output."
        )


def _round(values: Any) -> str:
    return "/".join(f"{value:.3g}" for value in values)
