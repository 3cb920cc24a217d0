"""Save a trained model as a folder or Hugging Face repository, with a model card, and verify it."""

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from vitascope.errors import UserError, shorten_error_message, suggest_choice
from vitascope.evaluation.model_card import make_exported_model_card
from vitascope.inference.classifier import Classifier
from vitascope.inference.fast import compute_max_relative_error, copy_as_frozen_cpu_model
from vitascope.run.checkpoint import LAST_WEIGHTS, save_weights
from vitascope.run.directory import check_not_run_folder
from vitascope.run.files import make_folder, write_atomically, write_json
from vitascope.weights.pretrained import read_pretrained_model
from vitascope.weights.write_formats import CONVERTERS_BY_LIBRARY

TOLERANCE = 1e-5  # relative to the largest logit
LogitsFunction = Callable[[Tensor], Tensor]  # prepared images -> logits


def save_pretrained(
    model: Classifier,
    folder: str | os.PathLike[str],
    *,
    library: str = "vitascope",
    repository: str | None = None,
) -> Path:
    """Write config.json, model.safetensors and README.md for `vitascope.open_model`, timm or transformers (`library`).

    The files are first written to a temporary folder and loaded by that library. They are moved to `folder` only if
    the outputs equal the model's. `repository`: the name on the hub, for the card's code."""
    if library not in CONVERTERS_BY_LIBRARY:
        raise UserError(f"--for {library} is unknown. {suggest_choice(library, CONVERTERS_BY_LIBRARY)}")
    target = Path(folder).resolve()
    check_not_run_folder(target)
    weights = {temporary: tensor.detach().cpu() for temporary, tensor in model.model.state_dict().items()}
    files, tensors = CONVERTERS_BY_LIBRARY[library](model.info, weights)
    make_folder(target.parent)
    try:
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            staging = Path(temporary)
            for file, content in files.items():
                write_json(staging / file, content)
            save_weights(staging / LAST_WEIGHTS, tensors)
            card = make_exported_model_card(model, library, repository or "FOLDER", on_hub=repository is not None)
            write_atomically(staging / "README.md", card.format_markdown())
            measure_and_check_saved_model_error(model, staging, library)
            make_folder(target)
            for file in sorted(staging.iterdir()):
                file.replace(target / file.name)
    except OSError as error:
        raise UserError(f"{target} could not be written: {error.strerror or shorten_error_message(error)}.") from error
    return Path(folder)


def push_to_hub(
    model: Classifier,
    repository: str,
    *,
    library: str = "vitascope",
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload the folder as a repository to the Hugging Face hub; needs an account. Returns its URL."""
    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        save_pretrained(model, folder, library=library, repository=repository)
        api = HfApi(token=token)
        try:
            url = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder)
        except Exception as error:  # the hub's and the network's errors have no common name
            raise UserError(
                f"{repository} could not be written to the hub ({shorten_error_message(error, 160)}). "
                "Log in with: hf auth login. Or write a folder with `vitascope export folder` and upload it yourself."
            ) from error
    return str(url)


@torch.no_grad()
def measure_and_check_saved_model_error(model: Classifier, folder: Path, library: str) -> float:
    """Return the largest relative difference between the saved and the original model's logits.

    Raise a UserError if it exceeds rounding. The original is computed in float32, in evaluation mode."""
    shape = (model.config.in_chans, *model.config.image_shape)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        saved_model = MODEL_LOADERS[library](folder)
        logits = saved_model(images)
    except Exception as error:  # a library's own errors have no common name
        raise UserError(
            f"{library} cannot load the saved model ({shorten_error_message(error)}). {NOT_WRITTEN_MESSAGE}"
        ) from error
    error_size = compute_max_relative_error(logits, copy_as_frozen_cpu_model(model.vision_transformer)(images))
    if not error_size <= TOLERANCE:
        raise UserError(
            f"Loaded by {library}, the saved model's logits differ by {error_size:.1e} of the PyTorch model's largest "
            f"logit. "
            f"{NOT_WRITTEN_MESSAGE}"
        )
    return error_size


def _load_with_timm(folder: Path) -> LogitsFunction:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def _load_with_transformers_or_vitascope(folder: Path) -> LogitsFunction:
    """Load with transformers, or with Vitascope if transformers is not installed."""
    if find_spec("transformers") is None:
        return read_pretrained_model(str(folder)).build_model()
    from transformers import ViTForImageClassification

    with redirect_stderr(StringIO()):  # its progress bar
        model = ViTForImageClassification.from_pretrained(folder).eval()
    return lambda images: model(images).logits


NOT_WRITTEN_MESSAGE = "Nothing was written. Please report this, with the model's settings."
MODEL_LOADERS: dict[str, Callable[[Path], LogitsFunction]] = {
    "vitascope": lambda folder: read_pretrained_model(str(folder)).build_model(),
    "timm": _load_with_timm,
    "transformers": _load_with_transformers_or_vitascope,
}
