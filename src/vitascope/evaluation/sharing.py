"""A trained model -> a folder or a Hugging Face repository that others load it from, with a card and checked."""

import os
from pathlib import Path

import torch

from vitascope.errors import UserError, did_you_mean
from vitascope.evaluation.card import card
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.run.files import make_folder, write_json, write_whole
from vitascope.run.weights import LAST, save_weights
from vitascope.weights.forms import FORMS
from vitascope.weights.pretrained import open_weights

CLOSE = 1e-5  # relative to the largest logit


def save_pretrained(model: TrainedTransformer, folder: str | os.PathLike[str], *, form: str = "vitascope") -> Path:
    """config.json, model.safetensors and README.md, as `vitascope.load`, timm or transformers read them (`form`).

    What was written is opened again and must answer as the model does."""
    if form not in FORMS:
        raise UserError(f"form={form!r} is unknown. {did_you_mean(form, FORMS)}")
    place = Path(folder)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    files, tensors = FORMS[form](model.facts, weights)
    make_folder(place)
    for name, said in files.items():
        write_json(place / name, said)
    save_weights(place / LAST, tensors)
    write_whole(place / "README.md", card(model, form))
    check_saved(model, place)
    return place


def push_to_hub(
    model: TrainedTransformer,
    repository: str,
    *,
    form: str = "vitascope",
    private: bool = False,
    token: str | None = None,
) -> str:
    """The same folder, as a repository on the Hugging Face hub; needs an account there. Its address comes back."""
    from tempfile import TemporaryDirectory

    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        save_pretrained(model, folder, form=form)
        api = HfApi(token=token)
        try:
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder)
        except Exception as error:  # the hub's and the network's errors have no common name
            why = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise UserError(
                f"{repository} could not be written on the hub ({why}). Log in with: hf auth login. Or save a folder "
                "with save_pretrained and upload it yourself."
            ) from error
    return str(address)


@torch.no_grad()
def check_saved(model: TrainedTransformer, folder: Path) -> float:
    """How far the folder's answers are from the model's, relative to the largest; more than rounding is refused."""
    back = open_weights(str(folder)).model()
    device = next(model.parameters()).device
    shape = (model.config.in_chans, *model.config.image_shape)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    wanted = model(images.to(device)).cpu()
    apart = ((back(images) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)).item()
    if not apart <= CLOSE:
        raise UserError(f"{folder} was written, but what it holds answers otherwise (by {apart:.1e}). Do not use it.")
    return apart
