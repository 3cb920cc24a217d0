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

from vitascope.errors import UserError, did_you_mean, first_line
from vitascope.evaluation.card import card
from vitascope.evaluation.plain import apart, plain_copy
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.run.directory import refuse_run
from vitascope.run.files import make_folder, write_json, write_whole
from vitascope.run.weights import LAST, save_weights
from vitascope.weights.forms import FORMS
from vitascope.weights.pretrained import open_weights

CLOSE = 1e-5  # relative to the largest logit


def save_pretrained(model: TrainedTransformer, folder: str | os.PathLike[str], *, form: str = "vitascope") -> Path:
    """Write config.json, model.safetensors and README.md for `vitascope.load`, timm or transformers (`form`).

    The files are first written to a temporary folder and loaded by that library. They are moved to `folder` only if
    the outputs equal the model's."""
    if form not in FORMS:
        raise UserError(f"form={form!r} is unknown. {did_you_mean(form, FORMS)}")
    place = Path(folder).resolve()
    refuse_run(place)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    files, tensors = FORMS[form](model.facts, weights)
    make_folder(place.parent)
    try:
        with TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as name:
            beside = Path(name)
            for file, said in files.items():
                write_json(beside / file, said)
            save_weights(beside / LAST, tensors)
            write_whole(beside / "README.md", card(model, form))
            check_saved(model, beside, form)
            make_folder(place)
            for file in sorted(beside.iterdir()):
                file.replace(place / file.name)
    except OSError as error:
        raise UserError(f"{place} could not be written: {error.strerror or first_line(error)}.") from error
    return Path(folder)


def push_to_hub(
    model: TrainedTransformer,
    repository: str,
    *,
    form: str = "vitascope",
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload the folder as a repository to the Hugging Face hub; needs an account. Returns its URL."""
    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        save_pretrained(model, folder, form=form)
        api = HfApi(token=token)
        try:
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder)
        except Exception as error:  # the hub's and the network's errors have no common name
            raise UserError(
                f"{repository} could not be written to the hub ({first_line(error, 160)}). Log in with: hf auth login. "
                "Or save a folder with save_pretrained and upload it yourself."
            ) from error
    return str(address)


@torch.no_grad()
def check_saved(model: TrainedTransformer, folder: Path, form: str) -> float:
    """Return the largest relative difference between the saved and the original model's logits.

    Raise a UserError if it exceeds rounding. The original is computed in float32, in evaluation mode."""
    shape = (model.config.in_chans, *model.config.image_shape)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        back = OPENERS[form](folder)
        found = back(images)
    except Exception as error:  # a library's own errors have no common name
        raise UserError(f"{form} cannot load the saved model ({first_line(error)}). {NOTHING}") from error
    far = apart(found, plain_copy(model)(images))
    if not far <= CLOSE:
        raise UserError(f"Loaded by {form}, the saved model's logits differ (relative error {far:.1e}). {NOTHING}")
    return far


def _by_timm(folder: Path) -> Callable[[Tensor], Tensor]:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def _by_transformers(folder: Path) -> Callable[[Tensor], Tensor]:
    """Load with transformers, or with Vitascope if transformers is not installed."""
    if find_spec("transformers") is None:
        return open_weights(str(folder)).model()
    from transformers import ViTForImageClassification

    with redirect_stderr(StringIO()):  # its progress bar
        theirs = ViTForImageClassification.from_pretrained(folder).eval()
    return lambda images: theirs(images).logits


NOTHING = "Nothing was written. Please report this, with the model's settings."
OPENERS: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "vitascope": lambda folder: open_weights(str(folder)).model(),
    "timm": _by_timm,
    "transformers": _by_transformers,
}
