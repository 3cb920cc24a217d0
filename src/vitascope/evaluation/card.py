"""Write the model card (README.md) of a trained model: architecture, usage, accuracy and origin."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitascope.evaluation.openings import read_openings
from vitascope.model.anatomy import total_parameters
from vitascope.run.directory import Outside

if TYPE_CHECKING:
    from vitascope.evaluation.trained import TrainedTransformer

USES = {
    "vitascope": 'from vitascope import load\n\nmodel = load("FOLDER")\nprint(model.predict("photo.png").labels)',
    "timm": 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()',
    "transformers": (
        "from transformers import ViTForImageClassification\n\n"
        'model = ViTForImageClassification.from_pretrained("FOLDER").eval()'
    ),
}


def card(model: "TrainedTransformer", form: str) -> str:
    """Return Markdown with the header that the Hugging Face hub reads; all numbers come from the run's files."""
    config = model.config
    head = ["---", f"library_name: {form}", "pipeline_tag: image-classification", "tags: [vitascope, vit]", "---"]
    size = f"{config.in_chans} × {config.image_shape[0]} × {config.image_shape[1]}"
    what = (
        f"A vision transformer with {total_parameters(config):,} parameters: {config.depth} blocks, width "
        f"{config.embed_dim}, {config.num_heads} heads, {config.num_tokens} tokens. Its input is an image of {size} "
        f"(channels × height × width). It predicts one of {len(model.classes)} classes: "
        f"{', '.join(model.classes[:20])}"
        f"{' …' if len(model.classes) > 20 else ''}."
    )
    prepared = model.facts.preparation
    use = (
        f"```python\n{use_of(form, 'FOLDER')}\n```\n\n"
        f"Images are resized to {prepared.size[0]}×{prepared.size[1]} pixels, divided by 255 and normalised with mean "
        f"{_rounded(prepared.mean)} and standard deviation {_rounded(prepared.std)}. The model always predicts "
        "one of these classes, even for other images. Its probabilities are not calibrated."
    )
    parts = [
        "\n".join(head),
        f"# {model.run.recipe.name}",
        what,
        f"## Use\n\n{use}",
        f"## Accuracy\n\n{_how_good(model)}",
        f"## Origin\n\n{_origin(model)}",
    ]
    return "\n\n".join(parts) + "\n"


PROBE = "Trained without labels. The classifier is a linear probe on the frozen features."


def use_of(form: str, folder: str) -> str:
    """Return Python code that loads the folder."""
    return USES[form].replace("FOLDER", folder)


def _how_good(model: "TrainedTransformer") -> str:
    if isinstance(model.run, Outside):
        return "Not measured."
    lines = [PROBE] if model.facts.probe else []
    rows = [row for row in model.run.metrics if "val_accuracy" in row]
    if rows and model.weights.startswith("best"):
        best = max(rows, key=lambda row: row["knn_accuracy" if "knn_accuracy" in row else "val_accuracy"])
        lines.append(
            f"Validation accuracy {best['val_accuracy']:.2%} (epoch {best['epoch']}, the best of {len(rows)} "
            "epochs; chosen on these images)."
        )
    elif rows:
        lines.append(f"Validation accuracy {rows[-1]['val_accuracy']:.2%} (last epoch).")
    for opening in read_openings(model.run):
        if opening.of_the_run:
            data, split, views, weights = opening.what
            views_words = f", {views} views" if views > 1 else ""
            which = "first evaluation" if opening.number == 1 else f"evaluation number {opening.number}"
            lines.append(
                f"{split.capitalize()} accuracy on {_name(data)}: {opening.found['accuracy']:.2%} ({weights} epoch's "
                f"weights{views_words}; {which} on {'the test' if split == 'test' else 'these'} images)."
            )
    return "\n".join(f"- {line}" for line in lines) or "Not measured yet. Measure it with `vitascope evaluate`."


def _origin(model: "TrainedTransformer") -> str:
    if isinstance(model.run, Outside):
        return f"Weights: `{_name(model.run.word)}`. Converted by Vitascope."
    recipe, machine = model.run.recipe, model.run.machine
    facts = ("commit", "versions", "training_images")
    said: dict[str, Any] = {name: machine[name] for name in facts if machine.get(name)}
    start = f", starting from `{_name(recipe.weights)}`" if recipe.weights else ", from scratch"
    text = (
        f"Trained by Vitascope: recipe `{recipe.name}`, data `{_name(recipe.data.name)}`, "
        f"{recipe.train.epochs * recipe.data.passes_per_epoch} epochs, seed {recipe.train.seed}{start}."
    )
    return f"{text}\n\n```json\n{json.dumps(said, indent=1, default=str)}\n```" if said else text


def _name(word: str) -> str:
    """Return a path's last part: the full path exists only on this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def _rounded(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
