"""Find pretrained weights: given, in a local file, in the cache of timm or Hugging Face, or by a download."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vitascope.data.data_root import choose_data_root
from vitascope.errors import UserError
from vitascope.model.anatomy import count_parameters
from vitascope.model.config import ModelConfig
from vitascope.training.initial_weights import STAGE_PREFIX, make_model_ref_absolute
from vitascope.weights.files import WEIGHTS_SUFFIXES, is_hub_reachable
from vitascope.weights.pretrained import ACCEPTED_WEIGHTS_HELP, read_pretrained_model

KNOWN_MODELS = (  # names of weights that are known to be plain ViTs, the fastest first
    *("deit_tiny_patch16_224", "vit_tiny_patch16_224", "deit_small_patch16_224", "vit_small_patch16_224"),
    *("deit_base_patch16_224", "vit_base_patch16_224"),
)
CACHED_REPOSITORIES = {  # on the Hugging Face Hub -> weights=
    "timm/deit_tiny_patch16_224.fb_in1k": "timm:deit_tiny_patch16_224.fb_in1k",
    "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k": "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "facebook/deit-tiny-patch16-224": "hf:facebook/deit-tiny-patch16-224",
    "timm/deit_small_patch16_224.fb_in1k": "timm:deit_small_patch16_224.fb_in1k",
    "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": "timm:vit_small_patch16_224.augreg_in21k_ft_in1k",
    "facebook/deit-small-patch16-224": "hf:facebook/deit-small-patch16-224",
    "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k": "timm:vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "google/vit-base-patch16-224": "hf:google/vit-base-patch16-224",
}
DOWNLOADED = "timm:deit_tiny_patch16_224.fb_in1k"
DOWNLOAD_SECONDS = 60.0
FROM_SCRATCH = ("null", "none", "~")  # values of weights= that mean random initial weights
WEIGHTS_FOLDER = "weights"


@dataclass(frozen=True)
class WeightsAtHand:
    """Pretrained weights, where they were found, and their model. No `ref`: there are none."""

    ref: str | None = None  # value of weights=
    origin: str = ""  # for the user
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model)


def find_weights(given: str | None, data_root: str | None, *, may_download: bool = True) -> WeightsAtHand:
    """Return the weights that the user gives, else the first that are found. `given`: None if the user gives none."""
    if given is not None:
        return _read_given_weights(given.strip())
    for path in _iterate_local_files(data_root):
        if weights := _try_to_read(str(path.resolve()), f"found in {path.parent.resolve()}"):
            return weights
    for ref in _iterate_cached_models():
        if weights := _try_to_read(ref, "in the cache of timm and Hugging Face"):
            return weights
    if not may_download:
        return WeightsAtHand(origin="none are on this machine, and data.download=false")
    return _download_weights()


def _read_given_weights(ref: str) -> WeightsAtHand:
    if not ref:
        raise UserError(f"weights= is empty. {ACCEPTED_WEIGHTS_HELP} To train from scratch, write weights=null.")
    if ref.lower() in FROM_SCRATCH:
        return WeightsAtHand(origin="weights=null was given")
    if ref.startswith(STAGE_PREFIX):
        raise UserError(f"weights={ref} works only with a recipe. {ACCEPTED_WEIGHTS_HELP}")
    pretrained = read_pretrained_model(make_model_ref_absolute(ref))
    return WeightsAtHand(ref, "given", pretrained.info.model)


def _try_to_read(ref: str, origin: str) -> WeightsAtHand | None:
    """Return the weights; None if they are not those of a plain ViT."""
    try:
        return WeightsAtHand(ref, origin, read_pretrained_model(ref).info.model)
    except UserError:
        return None


def _iterate_local_files(data_root: str | None) -> Iterator[Path]:
    """Yield files with the names of known models, then other weights in folders called weights."""
    root = choose_data_root(data_root)
    folders = [Path(WEIGHTS_FOLDER), root / WEIGHTS_FOLDER, Path(), root]
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if _is_weights(path)]
    for name in KNOWN_MODELS:
        yield from (path for path in files if path.name.startswith(name))
    for path in files:
        if path.parent.name == WEIGHTS_FOLDER and not path.name.startswith(KNOWN_MODELS):
            yield path


def _is_weights(path: Path) -> bool:
    return path.suffix in WEIGHTS_SUFFIXES and path.is_file()


def _iterate_cached_models() -> Iterator[str]:
    """Yield models in the cache of the Hugging Face Hub, which timm uses too. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    for repository, ref in CACHED_REPOSITORIES.items():
        if isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
            yield ref


def _download_weights() -> WeightsAtHand:
    """Download the smallest weights, if the hub can be reached and answers in time."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on") or not is_hub_reachable():
        return WeightsAtHand(origin="none are on this machine, and the Hugging Face Hub cannot be reached")
    results: list[WeightsAtHand | None] = []
    thread = threading.Thread(target=lambda: results.append(_try_to_read(DOWNLOADED, "downloaded")), daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if results and results[0]:
        return results[0]
    reason = "the download failed" if results else f"the download took more than {DOWNLOAD_SECONDS:.0f} s"
    return WeightsAtHand(origin=f"none are on this machine, and {reason}")
