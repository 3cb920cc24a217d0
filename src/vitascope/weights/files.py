"""Read the tensors of a weights file. Code in the file is never executed."""

import re
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitascope.errors import UserError, first_line

ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
# Where training scripts put a model's weights inside a checkpoint; averaged ones and DINO's teacher are those to use.
INSIDE = ("model_ema", "state_dict_ema", "teacher", "model", "state_dict", "student")
WRAPPERS = ("module.", "_orig_mod.", "backbone.", "model.")  # of DistributedDataParallel, torch.compile, DINO, others


def read_tensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The model's weights in float32 without wrapper prefixes, and the names of other tensors in the file."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    if not tensors:
        inside = ", ".join(str(name) for name in list(found)[:5])
        raise UserError(
            f"{path} contains no named tensors; it contains {inside or 'nothing'}. "
            f"Save the model's state_dict(), directly or under one of {', '.join(INSIDE)}."
        )
    if broken := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
        raise UserError(f"{path}: {broken} contains NaN or infinite values, so the weights cannot be used.")
    return unwrapped({name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})


def unwrapped(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Remove prefixes: model.backbone.blocks.0 … -> blocks.0 …. Tensors outside the wrapped model are removed."""
    left_out: list[str] = []
    while wrapper := next((start for start in WRAPPERS if any(name.startswith(start) for name in tensors)), None):
        left_out += [name for name in tensors if not name.startswith(wrapper)]
        tensors = {name.removeprefix(wrapper): t for name, t in tensors.items() if name.startswith(wrapper)}
    return tensors, sorted(left_out)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({first_line(error)}). Download it again."
        ) from error


def _read_pickle(path: Path) -> dict[str, Any]:
    """`weights_only` reads tensors and plain containers. Other objects in the pickle raise an error."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickle protocols
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        if "unsupported global" in str(error).lower() or path.read_bytes()[:1] == b"\x80":
            raise UserError(
                f"{path} contains Python objects other than tensors{_named(error)}. Nothing was executed. "
                "Save only the model's state_dict(), or use a .safetensors file."
            ) from error
        raise UserError(
            f"{path} cannot be read as weights: it is not a complete PyTorch file. Download it again."
        ) from error
    except Exception as error:  # torch and zipfile have errors of their own
        raise UserError(f"{path} cannot be read as weights ({first_line(error)}). Download it again.") from error
    for name in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    return found if isinstance(found, dict) else {}


def _named(error: Exception) -> str:
    """Which object, where PyTorch says it: GLOBAL argparse.Namespace."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f" ({found.group(1)})" if found else ""
