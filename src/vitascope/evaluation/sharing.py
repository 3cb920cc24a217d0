"""A trained model -> a folder or a Hugging Face repository that others load it from, with a card and checked."""

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
    """config.json, model.safetensors and README.md, as `vitascope.load`, timm or transformers read them (`form`).

    They are written beside the folder first, opened by the library that they are for, and moved into it only if they
    answer as the model does."""
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
    """The same folder, as a repository on the Hugging Face hub; needs an account there. Its address comes back."""
    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        save_pretrained(model, folder, form=form)
        api = HfApi(token=token)
        try:
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder)
        except Exception as error:  # the hub's and the network's errors have no common name
            raise UserError(
                f"{repository} could not be written on the hub ({first_line(error, 160)}). Log in with: hf auth login. "
                "Or save a folder with save_pretrained and upload it yourself."
            ) from error
    return str(address)


@torch.no_grad()
def check_saved(model: TrainedTransformer, folder: Path, form: str) -> float:
    """How far the folder's answers are from the model's, relative to the largest; more than rounding is refused.

    The model's are those of its weights in float32, whatever mode it is in and however fast it answers."""
    shape = (model.config.in_chans, *model.config.image_shape)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        back = OPENERS[form](folder)
        found = back(images)
    except Exception as error:  # a library's own errors have no common name
        raise UserError(f"{form} cannot open what was made for it ({first_line(error)}). {NOTHING}") from error
    far = apart(found, plain_copy(model)(images))
    if not far <= CLOSE:
        raise UserError(f"Opened by {form}, the saved model answers otherwise (by {far:.1e} of the largest). {NOTHING}")
    return far


def _by_timm(folder: Path) -> Callable[[Tensor], Tensor]:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def _by_transformers(folder: Path) -> Callable[[Tensor], Tensor]:
    """By our own reader where transformers is not installed."""
    if find_spec("transformers") is None:
        return open_weights(str(folder)).model()
    from transformers import ViTForImageClassification

    with redirect_stderr(StringIO()):  # its progress bar
        theirs = ViTForImageClassification.from_pretrained(folder).eval()
    return lambda images: theirs(images).logits


NOTHING = "Nothing was written. Please report it, with the model's settings."
OPENERS: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "vitascope": lambda folder: open_weights(str(folder)).model(),
    "timm": _by_timm,
    "transformers": _by_transformers,
}
