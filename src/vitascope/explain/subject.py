"""A run, `timm:NAME` or a weights file -> the model to look into, with its classes and how its images are prepared."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.evaluation.reading import Stored
from vitascope.evaluation.trained import TrainedTransformer, load
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images

ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Subject:
    name: str
    model: nn.Module
    classes: list[str]
    preparation: Preparation
    stored: Stored

    @property
    def run(self) -> TrainedTransformer | None:
        return self.model if isinstance(self.model, TrainedTransformer) else None

    def pictures(self, images: Images) -> list[NDArray]:
        """Back to what a person sees: height × width × channel, between 0 and 1."""
        return [image.permute(1, 2, 0).numpy() for image in self.preparation.undone(images)]

    def number_of(self, target: str) -> int:
        """A class by its name or its number."""
        if target in self.classes:
            return self.classes.index(target)
        if target.isdigit() and int(target) < len(self.classes):
            return int(target)
        some = ", ".join(self.classes[:10]) + (" …" if len(self.classes) > 10 else "")
        raise UserError(f"There is no class '{target}'. Classes: {some}")


def open_subject(word: str, *, best: bool = False) -> Subject:
    if word.startswith("timm:"):
        return _from_timm(word.removeprefix("timm:"))
    path = Path(word)
    if path.suffix in ENDINGS:
        return _from_file(path)
    model = load(path, best=best)
    return Subject(str(model.run.path), model, model.classes, model.facts.preparation, model.facts.stored)


def _from_timm(name: str) -> Subject:
    import timm
    from timm.data.config import resolve_model_data_config

    if not timm.is_model(name):
        near = timm.list_models(f"*{name}*")[:3] or timm.list_models("vit_tiny*")[:3]
        raise UserError(f"timm has no model '{name}'. It has {', '.join(near)}, …")
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # the hub's and the network's errors have no common name
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"timm's weights of {name} could not be loaded ({why[:160]}). Without a network, give a weights file."
        ) from error
    said: dict[str, Any] = resolve_model_data_config(model)
    channels, rows, columns = said["input_size"]
    preparation = Preparation((rows, columns), tuple(said["mean"]), tuple(said["std"]))
    classes = class_names(getattr(model, "num_classes", 0))
    return Subject(f"timm:{name}", model.eval(), classes, preparation, (channels, rows, columns))


def _from_file(path: Path) -> Subject:
    """Weights with timm's names; what shapes do not say is as in timm's ViTs: heads 64 wide, ImageNet's mean."""
    weights = read_weights(path)
    config = config_of(weights, path)
    model = VisionTransformer(config).eval()
    try:
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except RuntimeError as error:
        raise UserError(f"{path} does not fit a ViT with timm's names: {' '.join(str(error).split())[:200]}") from error
    three = config.in_chans == 3
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if three else ((0.5,) * config.in_chans, (0.5,) * config.in_chans)
    stored = (config.in_chans, *config.image_shape)
    return Subject(
        str(path), model, class_names(config.num_classes), Preparation(config.image_shape, mean, std), stored
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # every format has errors of its own
        raise UserError(f"{path} cannot be read as weights ({type(error).__name__}).") from error
    found = found.get("model", found.get("state_dict", found)) if isinstance(found, dict) else {}
    return {name: weight for name, weight in found.items() if isinstance(weight, Tensor)}


def config_of(weights: dict[str, Tensor], path: Path) -> ModelConfig:
    """Sizes from shapes."""
    needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight")
    missing = [name for name in needed if name not in weights]
    if missing:
        raise UserError(f"{path} is not a ViT with timm's names: it has no {missing[0]}.")
    width, channels, rows, columns = weights["patch_embed.proj.weight"].shape
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    prefix = int("cls_token" in weights) + registers
    side = math.isqrt(weights["pos_embed"].shape[1] - prefix)
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    return ModelConfig(
        img_size=(side * rows, side * columns),
        patch_size=(rows, columns),
        in_chans=channels,
        num_classes=weights["head.weight"].shape[0] if "head.weight" in weights else 0,
        embed_dim=width,
        depth=depth,
        num_heads=max(1, width // 64),
        class_token="cls_token" in weights,
        reg_tokens=registers,
        global_pool="avg" if "fc_norm.weight" in weights else "token",
        qkv_bias="blocks.0.attn.qkv.bias" in weights,
        init_values=1.0 if "blocks.0.ls1.gamma" in weights else None,
        norm="layernorm" if "blocks.0.norm1.bias" in weights else "rmsnorm",
    )


def class_names(count: int) -> list[str]:
    """ImageNet's where there are a thousand, else numbers."""
    if count != 1000:
        return [str(number) for number in range(count)]
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return [info.index_to_description(number).split(",")[0] for number in range(count)]
