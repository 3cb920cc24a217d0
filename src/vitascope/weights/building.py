"""Build the network that a timm config.json describes, with random weights. The file is not trusted."""

import inspect
from pathlib import Path
from typing import Any

from vitascope.errors import UserError

SAID = ("mean", "std", "input_size")  # of pretrained_cfg: what answering needs
# Parameters of timm's builders that fetch, open or wrap something; a network's own settings are all others.
NOT_A_SETTING = (
    "features_only",
    "out_indices",
    "pretrained_custom_load",
    "url",
    "file",
    "hf_hub_id",
    "device",
    "dtype",
)


def build_timm(said: dict[str, Any], path: Path, *, plain: bool = False) -> Any:
    """Build the network with timm. `plain`: accept only settings of timm's VisionTransformer."""
    import timm

    where, name = path / "config.json", said.get("architecture")
    if not isinstance(name, str) or ":" in name or not timm.is_model(name):  # hf-hub:…, local-dir:… open other places
        raise UserError(f"{where}: timm has no architecture '{name}'. Use a name such as vit_tiny_patch16_224.")
    settings = _settings(said.get("model_args") or {}, where, plain)
    try:
        return timm.create_model(
            name, pretrained=False, pretrained_cfg_overlay=_overlay(said.get("pretrained_cfg") or {}),
            **({"num_classes": said.get("num_classes", 1000)} | settings),
        )  # fmt: skip
    except Exception as error:  # a file can say anything
        raise UserError(f"timm cannot build the model in {where} ({type(error).__name__}).") from error


def fill_timm(model: Any, tensors: dict[str, Any], where: str) -> Any:
    """Load the weights into the network."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{where}: the weights do not fit {model.pretrained_cfg['architecture']}.") from error
    return model.eval()


def _settings(given: Any, where: Path, plain: bool) -> dict[str, Any]:
    from timm.models._builder import build_model_with_cfg
    from timm.models._factory import create_model
    from timm.models.vision_transformer import VisionTransformer

    own = {name for maker in (create_model, build_model_with_cfg) for name in inspect.signature(maker).parameters}
    own |= set(NOT_A_SETTING)
    known = set(inspect.signature(VisionTransformer).parameters)
    if not isinstance(given, dict):
        raise UserError(f"{where}: model_args must map names to values.")
    for name, value in given.items():
        if name in own or (plain and name not in known) or not _simple(value):
            raise UserError(f"{where}: model_args may contain only plain settings of the network; {name} is not one.")
    return given


def _simple(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, str | int | float) for part in parts)


def _overlay(told: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(told[name]) for name in SAID if told.get(name)}
