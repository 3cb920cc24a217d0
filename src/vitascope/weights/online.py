"""Download weights of timm and Hugging Face by name, with their own libraries."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import nn

from vitascope.errors import UserError, first_line
from vitascope.weights.known import Known

PATIENCE = 5.0  # seconds


def fetch_timm(name: str) -> nn.Module:
    """timm's own model with its published weights."""
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"*{name}*")[:3] or get_close_matches(name, timm.list_models(), 3, cutoff=0.3)
        raise UserError(f"timm has no model '{name}'. It has {', '.join(near)}, …")
    try:
        with at_once():
            return timm.create_model(name, pretrained=True).eval()
    except Exception as error:  # the hub's and the network's errors have no common name
        raise UserError(
            f"The timm weights {name} could not be downloaded ({_why(error)}). To work offline, download config.json "
            f"and model.safetensors of the repository timm/{_tag(name)} on another machine. Put both in one folder "
            f"here, and use its path instead of timm:{name}."
        ) from error


@contextmanager
def at_once() -> Iterator[None]:
    """If the hub cannot be reached, use its cache at once instead of retrying for a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(address: str) -> bool:
    parts = urlsplit(address)
    if any(name.lower() in ("https_proxy", "http_proxy", "all_proxy") for name in os.environ):
        return True  # a proxy is set, so a direct connection says nothing
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 443), timeout=PATIENCE):
            return True
    except OSError:
        return False


def known_of_timm(model: Any) -> Known:
    """Settings and normalisation of a timm model."""
    from timm.data.config import resolve_model_data_config
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(model) is not VisionTransformer:  # a subclass computes something else
        raise UserError(f"timm's {type(model).__name__} is not a plain ViT.")
    first: Any = model.blocks[0] if len(model.blocks) else None
    if type(first) is not Block or getattr(model.patch_embed, "img_size", None) is None:
        part = type(model.patch_embed if type(first) is Block else first).__name__
        raise UserError(f"This timm model is not a plain ViT: it has {part}.")
    said: dict[str, Any] = resolve_model_data_config(model)
    size = tuple(model.patch_embed.img_size)
    settings = {
        "img_size": size[0] if size[0] == size[1] else size,
        "num_heads": first.attn.num_heads,
        "norm_eps": getattr(first.norm1, "eps", 1e-6),
        "global_pool": model.global_pool,
    }
    return Known(settings, None, tuple(said["mean"]), tuple(said["std"]), "timm")


def fetch_repository(repository: str) -> Path:
    """A Hugging Face repository's config and weights, from its cache or from the network -> a folder."""
    from huggingface_hub import snapshot_download

    files = ["config.json", "preprocessor_config.json", "model.safetensors", "pytorch_model.bin"]
    try:
        with at_once():
            return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:  # the hub's and the network's errors have no common name
        raise UserError(
            f"The repository {repository} could not be downloaded ({_why(error)}). To work offline, download its "
            "config.json and model.safetensors on another machine. Put both in one folder here, and use its path."
        ) from error


def _tag(name: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(name)
    return f"{name.split('.')[0]}.{config.tag}" if config is not None and config.tag else name


def _why(error: Exception) -> str:
    words = str(error)
    if "offline" in words or "local cache" in words or "outgoing traffic" in words:
        return "the Hugging Face Hub cannot be reached, and the files are not in the cache"
    return first_line(error)[:120]
