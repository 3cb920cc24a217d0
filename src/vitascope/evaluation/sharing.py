"""Save a trained model as a folder or Hugging Face repository, with a model card, and verify it."""

import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError, shorten_error_message, suggest_choice
from vitascope.inference.classifier import Classifier
from vitascope.inference.fast import compute_max_relative_error, copy_as_frozen_cpu_model
from vitascope.model.anatomy import count_parameters
from vitascope.run.checkpoint import LAST_WEIGHTS, save_weights
from vitascope.run.directory import ExternalModel, check_not_run_folder
from vitascope.run.files import make_folder, write_atomically, write_json
from vitascope.run.test_set_log import read_test_set_log
from vitascope.weights.pretrained import read_pretrained_model
from vitascope.weights.write_formats import CONVERTERS_BY_LIBRARY

TOLERANCE = 1e-5  # relative to the largest logit
LogitsFunction = Callable[[Tensor], Tensor]  # prepared images -> logits


def save_pretrained(model: Classifier, folder: str | os.PathLike[str], *, library: str = "vitascope") -> Path:
    """Write config.json, model.safetensors and README.md for `vitascope.open_model`, timm or transformers (`library`).

    The files are first written to a temporary folder and loaded by that library. They are moved to `folder` only if
    the outputs equal the model's."""
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
            write_atomically(staging / "README.md", format_model_card(model, library))
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
        save_pretrained(model, folder, library=library)
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
            f"Loaded by {library}, the saved model's logits differ (relative error {error_size:.1e}). "
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


USAGE_CODE = {
    "vitascope": 'from vitascope import load\n\nmodel = load("FOLDER")\nprint(model.predict("photo.png").labels)',
    "timm": 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()',
    "transformers": (
        "from transformers import ViTForImageClassification\n\n"
        'model = ViTForImageClassification.from_pretrained("FOLDER").eval()'
    ),
}


def format_model_card(model: Classifier, library: str) -> str:
    """Return Markdown with the header that the Hugging Face hub reads; all numbers come from the run's files."""
    config = model.config
    header = ["---", f"library_name: {library}", "pipeline_tag: image-classification", "tags: [vitascope, vit]", "---"]
    shape = f"{config.in_chans} × {config.image_shape[0]} × {config.image_shape[1]}"
    description = (
        f"A vision transformer with {count_parameters(config):,} parameters: {config.depth} blocks, width "
        f"{config.embed_dim}, {config.num_heads} heads, {config.num_tokens} tokens. Its input is an image of {shape} "
        f"(channels × height × width). It predicts one of {len(model.classes)} classes: "
        f"{', '.join(model.classes[:20])}"
        f"{' …' if len(model.classes) > 20 else ''}."
    )
    preprocessing, size = model.info.preparation, model.info.preparation.size
    usage = (
        f"```python\n{format_loading_code(library, 'FOLDER')}\n```\n\n"
        f"An image's short side is resized and its centre cropped to {size[0]}×{size[1]} pixels. Pixels are divided by "
        f"255 and normalised with mean {_format_decimals(preprocessing.mean)} and standard deviation "
        f"{_format_decimals(preprocessing.std)}. The model always predicts one of these classes, even for other "
        "images. Its probabilities are not calibrated."
    )
    parts = [
        "\n".join(header),
        f"# {model.run.recipe.name}",
        description,
        f"## Use\n\n{usage}",
        f"## Accuracy\n\n{_format_accuracy_section(model)}",
        f"## Origin\n\n{_format_origin_section(model)}",
    ]
    return "\n\n".join(parts) + "\n"


PROBE_NOTE = "Trained without labels. The classifier is a linear probe on the frozen features."


def format_loading_code(library: str, folder: str) -> str:
    """Return Python code that loads the folder."""
    return USAGE_CODE[library].replace("FOLDER", folder)


def _format_accuracy_section(model: Classifier) -> str:
    if isinstance(model.run, ExternalModel):
        return "Not measured."
    lines = [PROBE_NOTE] if model.info.probe else []
    rows = [row for row in model.run.metrics if "val_accuracy" in row]
    if rows and model.weights_label.startswith("best"):
        best = max(rows, key=lambda row: row["knn_accuracy" if "knn_accuracy" in row else "val_accuracy"])
        lines.append(
            f"Validation accuracy {best['val_accuracy']:.2%} (epoch {best['epoch']}, the best of {len(rows)} "
            "epochs; chosen on these images)."
        )
    elif rows:
        precision = model.run.training_precision
        note = f", computed in {precision}" if precision not in (None, "float32") else ""
        lines.append(f"Validation accuracy {rows[-1]['val_accuracy']:.2%} (last epoch{note}).")
    for entry in read_test_set_log(model.run):
        if entry.is_finished_classifier_result:
            data, split, views, weights = entry.settings
            views_text = f", {views} views" if views > 1 else ""
            evaluation_text = "first evaluation" if entry.use_count == 1 else f"evaluation number {entry.use_count}"
            lines.append(
                f"{split.capitalize()} accuracy on {_keep_name_of_absolute_path(data)}: {entry.result['accuracy']:.2%} "
                f"({weights} epoch's weights{views_text}; {evaluation_text} on "
                f"{'the test' if split == 'test' else 'these'} images)."
            )
    return "\n".join(f"- {line}" for line in lines) or "Not measured yet. Measure it with `vitascope evaluate`."


def _format_origin_section(model: Classifier) -> str:
    if isinstance(model.run, ExternalModel):
        return f"Weights: `{_keep_name_of_absolute_path(model.run.model_ref)}`. Converted by Vitascope."
    recipe, machine = model.run.recipe, model.run.machine
    names = ("commit", "versions", "training_images")
    machine_facts: dict[str, Any] = {name: value for name in names if (value := machine.get(name))}
    start_text = (
        f", starting from `{_keep_name_of_absolute_path(recipe.weights)}`" if recipe.weights else ", from scratch"
    )
    text = (
        f"Trained by Vitascope: recipe `{recipe.name}`, data `{_keep_name_of_absolute_path(recipe.data.name)}`, "
        f"{recipe.train.epochs * recipe.data.passes_per_epoch} epochs, seed {recipe.train.seed}{start_text}."
    )
    return f"{text}\n\n```json\n{json.dumps(machine_facts, indent=1, default=str)}\n```" if machine_facts else text


def _keep_name_of_absolute_path(path_or_name: str) -> str:
    """Return a path's last part: the full path exists only on this machine."""
    return Path(path_or_name).name if Path(path_or_name).is_absolute() else path_or_name


def _format_decimals(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
