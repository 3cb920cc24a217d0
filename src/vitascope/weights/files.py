"""Read the tensors of a weights file without executing code; download weights of timm and Hugging Face by name."""

import json
import os
import re
import socket
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitascope.errors import UserError, shorten_error_message
from vitascope.weights.model_info import JsonObject, StateDict, WeightsMetadata

WEIGHTS_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
# Keys of a model's weights in a training checkpoint. Averaged weights and DINO's teacher come first.
CHECKPOINT_KEYS = ("model_ema", "state_dict_ema", "teacher", "model", "state_dict", "student")
# Prefixes of DistributedDataParallel, torch.compile, DINO and others.
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")


CHECKSUM_KEY = "vitascope_crc32"


class WeightsAndExtraNames(NamedTuple):
    tensors: StateDict  # of the model, without wrapper prefixes
    extra_names: list[str]  # tensors in the file that do not belong to the model


def read_float32_weights_and_extra_names(path: Path) -> WeightsAndExtraNames:
    """Read the model's weights in float32."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    contents = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle_weights_safely(path)
    tensors = {name: tensor for name, tensor in contents.items() if isinstance(tensor, Tensor)}
    if not tensors:
        keys = ", ".join(str(name) for name in list(contents)[:5])
        raise UserError(
            f"{path} contains no named tensors; it contains {keys or 'nothing'}. "
            f"Save the model's state_dict(), directly or under one of {', '.join(CHECKPOINT_KEYS)}."
        )
    if name := next((name for name, tensor in tensors.items() if tensor.is_complex()), None):
        raise UserError(f"{path}: {name} contains complex numbers, so the weights cannot be used.")
    if broken := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
        raise UserError(f"{path}: {broken} contains NaN or infinite values, so the weights cannot be used.")
    return remove_prefixes_and_outer_tensors(
        {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    )


def remove_prefixes_and_outer_tensors(tensors: StateDict) -> WeightsAndExtraNames:
    """Remove prefixes (model.backbone.blocks.0 becomes blocks.0), and tensors outside the wrapped model."""
    extra_names: list[str] = []
    while wrapper := next(
        (start for start in WRAPPER_PREFIXES if any(name.startswith(start) for name in tensors)), None
    ):
        extra_names += [name for name in tensors if not name.startswith(wrapper)]
        tensors = {name.removeprefix(wrapper): t for name, t in tensors.items() if name.startswith(wrapper)}
    return WeightsAndExtraNames(tensors, sorted(extra_names))


def make_safetensors_metadata(weights: StateDict) -> dict[str, str]:
    """Return the metadata of a safetensors file: the format, for transformers, and a checksum of the tensors."""
    return {"format": "pt", CHECKSUM_KEY: _compute_checksum(weights)}


def sort_safetensors_metadata(content: bytes) -> bytes:
    """Return the content of a safetensors file with sorted metadata, which the library writes in random order."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def read_safetensors(path: Path) -> StateDict:
    """Read all tensors. If the file has a checksum, verify it; files of other programs have none."""
    with safe_open(path, framework="pt") as file:
        weights, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    if CHECKSUM_KEY in metadata and metadata[CHECKSUM_KEY] != _compute_checksum(weights):
        raise UserError(
            f"{path} is damaged: its tensors do not match its checksum. Restore the file from a copy, or make it again."
        )
    return weights


def _compute_checksum(weights: StateDict) -> str:
    """Return the CRC-32 of names, types, shapes and bytes: five times as fast as a cryptographic hash."""
    checksum = 0
    for name, tensor in sorted(weights.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode(), checksum)
        checksum = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def _read_safetensors(path: Path) -> StateDict:
    try:
        return read_safetensors(path)
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({shorten_error_message(error)}). Download it again."
        ) from error


def read_safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, from the file's header. Nothing is loaded."""
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({shorten_error_message(error)}). Restore the file."
        ) from error


def _read_pickle_weights_safely(path: Path) -> dict[str, Any]:
    """Read tensors and plain containers (`weights_only`). Other objects in the pickle raise an error."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickle protocols
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        if "unsupported global" in str(error).lower() or path.read_bytes()[:1] == b"\x80":
            raise UserError(
                f"{path} contains Python objects other than tensors{_format_refused_object(error)}. "
                "Nothing was executed. Save only the model's state_dict(), or use a .safetensors file."
            ) from error
        raise UserError(
            f"{path} cannot be read as weights: it is not a complete PyTorch file. Download it again."
        ) from error
    except Exception as error:  # torch and zipfile have errors of their own
        raise UserError(
            f"{path} cannot be read as weights ({shorten_error_message(error)}). Download it again."
        ) from error
    for name in CHECKPOINT_KEYS:
        if isinstance(contents, dict) and isinstance(contents.get(name), dict):
            contents = contents[name]
    return contents if isinstance(contents, dict) else {}


def _format_refused_object(unpickling_error: Exception) -> str:
    """Return the object's name if PyTorch's message contains it, such as GLOBAL argparse.Namespace."""
    match = re.search(r"GLOBAL ([\w.]+)", str(unpickling_error))
    return f" ({match.group(1)})" if match else ""


CONNECT_TIMEOUT_SECONDS = 5.0


def download_timm_model(model_name: str) -> nn.Module:
    """Return timm's model with its published weights."""
    import timm

    if not timm.is_model(model_name):
        similar = timm.list_models(f"*{model_name}*")[:3]
        similar = similar or get_close_matches(model_name, timm.list_models(), 3, cutoff=0.3)
        raise UserError(f"timm has no model '{model_name}'. It has {', '.join(similar)}, …")
    try:
        with use_cache_if_offline():
            return timm.create_model(model_name, pretrained=True).eval()
    except Exception as error:  # the hub's and the network's errors have no common name
        raise UserError(
            f"The timm weights {model_name} could not be downloaded ({_describe_download_error(error)}). To work "
            f"offline, download config.json and model.safetensors of the repository "
            f"timm/{_get_timm_name_with_tag(model_name)} on another machine. Put both in one folder here, and give "
            f"that folder instead of timm:{model_name}; in a recipe: weights=FOLDER."
        ) from error


@contextmanager
def use_cache_if_offline() -> Iterator[None]:
    """If the hub cannot be reached, use its cache at once instead of retrying for a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not is_hub_reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_hub_reachable() -> bool:
    """Return whether the Hugging Face Hub answers within a few seconds, or is behind a proxy."""
    from huggingface_hub import constants

    return _is_proxied_or_reachable(constants.ENDPOINT)


def _is_proxied_or_reachable(url: str) -> bool:
    parts = urlsplit(url)
    if any(name.lower() in ("https_proxy", "http_proxy", "all_proxy") for name in os.environ):
        return True  # with a proxy, a direct connection does not tell whether the hub can be reached
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 443), timeout=CONNECT_TIMEOUT_SECONDS):
            return True
    except OSError:
        return False


def read_plain_timm_vit_metadata(timm_model: nn.Module) -> WeightsMetadata:
    """Return settings and normalisation of a plain ViT of timm."""
    from timm.data.config import resolve_model_data_config
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(timm_model) is not VisionTransformer:  # a subclass computes something else
        raise UserError(f"timm's {type(timm_model).__name__} is not a plain ViT.")
    first: Any = timm_model.blocks[0] if len(timm_model.blocks) else None
    if type(first) is not Block or getattr(timm_model.patch_embed, "img_size", None) is None:
        part = type(timm_model.patch_embed if type(first) is Block else first).__name__
        raise UserError(f"This timm model is not a plain ViT: it has {part}.")
    data_config: JsonObject = resolve_model_data_config(timm_model)
    size = timm_model.patch_embed.img_size
    settings = {
        "img_size": size[0] if size[0] == size[1] else tuple(size),
        "num_heads": first.attn.num_heads,
        "norm_eps": getattr(first.norm1, "eps", 1e-6),
        "global_pool": timm_model.global_pool,
    }
    return WeightsMetadata(settings, None, tuple(data_config["mean"]), tuple(data_config["std"]), "timm")


def download_hub_repository(repository_name: str) -> Path:
    """Download config and weights, or find them in the cache; return their folder."""
    from huggingface_hub import snapshot_download

    files = ["config.json", "preprocessor_config.json", "model.safetensors", "pytorch_model.bin"]
    try:
        with use_cache_if_offline():
            return Path(snapshot_download(repository_name, allow_patterns=files))
    except Exception as error:  # the hub's and the network's errors have no common name
        raise UserError(
            f"The repository {repository_name} could not be downloaded ({_describe_download_error(error)}). To work "
            "offline, download its config.json and model.safetensors on another machine. Put both in one folder "
            "here, and use its path."
        ) from error


def _get_timm_name_with_tag(model_name: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(model_name)
    return f"{model_name.split('.')[0]}.{config.tag}" if config is not None and config.tag else model_name


def _describe_download_error(error: Exception) -> str:
    message = str(error)
    if "offline" in message or "local cache" in message or "outgoing traffic" in message:
        return "the Hugging Face Hub cannot be reached, and the files are not in the cache"
    return shorten_error_message(error)[:120]
