"""Write model cards as Markdown: of exported folders here, of records in `records/pages.py`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vitascope.data.config import AugmentConfig
from vitascope.draw.html import Markdown, escape_markdown, format_markdown_inline_code, render_template
from vitascope.errors import format_count
from vitascope.inference.classifier import Classifier
from vitascope.model.anatomy import count_parameters
from vitascope.number_format import format_percent
from vitascope.run.directory import ExternalWeightsRun
from vitascope.run.listing import flatten_comparable_settings
from vitascope.run.test_set_log import read_test_set_log
from vitascope.weights.model_info import ModelInfo

SHOWN_SETTINGS = (
    *("model.img_size", "model.patch_size", "model.in_chans", "model.embed_dim", "model.depth", "model.num_heads"),
    *("model.positions", "model.norm", "model.mlp", "model.global_pool", "model.qk_norm", "model.drop_path_rate"),
    *("train.optimizer", "train.lr", "train.muon_lr", "train.weight_decay", "train.batch_size", "train.epochs"),
    *("train.schedule", "train.label_smoothing", "train.ema", "data.validation", "data.fraction"),
    *("data.passes_per_epoch", "model.initialize", "model.proj_bias", "train.whiten", "train.clip_grad"),
    *("data.augment.flip_mode", "data.augment.shift_fill"),
)
MAX_CLASS_NAMES = 20
PROBE_NOTE = "Trained without labels. The classifier is a linear probe on the frozen features."
USAGE_CODE = {  # library -> code for a folder or repository, REF; for PREPARE, SCALED and SCALE see `format_usage_code`
    "vitascope": 'from vitascope import load\n\nmodel = load("REF")\nprint(model.predict("photo.png"SCALE).labels)',
    "timm": (
        "import timm\nfrom PIL import Image, ImageOps\n\n"
        'model = timm.create_model("REF", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n\n"
        "PREPARE\n"
        "logits = model(transform(image)[None])SCALED\n"
        'print(model.pretrained_cfg["label_names"][logits.argmax()])'
    ),
    "transformers": (
        "from PIL import Image, ImageOps\nfrom transformers import AutoImageProcessor, ViTForImageClassification\n\n"
        'processor = AutoImageProcessor.from_pretrained("REF")\n'
        'model = ViTForImageClassification.from_pretrained("REF").eval()\n\n'
        "PREPARE\n"
        'logits = model(**processor(images=image, return_tensors="pt")).logitsSCALED\n'
        "print(model.config.id2label[logits.argmax().item()])"
    ),
}
# Prefix of a local folder and of a repository on the hub, where the library needs one.
REF_PREFIXES = {"vitascope": ("", "hf:"), "timm": ("local-dir:", "hf-hub:"), "transformers": ("", "")}


class UsageExample(NamedTuple):
    library: str
    code: str


@dataclass(frozen=True)
class ModelCard:
    """The facts of a model card. Everything but `results` and `origin` is plain text."""

    name: str
    num_parameters: int
    num_tokens: int
    settings: dict[str, Any]  # by their full names, such as model.depth
    classes: list[str]
    results: list[Markdown]  # paragraphs
    origin: Markdown
    origin_code: str
    origin_language: str  # of the code, such as bash
    data_name: str = ""  # empty: the training data are not known
    starts_from_weights: bool = False  # trained on other data before
    kind: str = ""  # such as "pure ViT"
    training: str = ""  # one sentence
    record_file: str = ""  # for records: the file that all numbers come from
    library: str = ""  # for exported models: the library that loads the folder
    reference: str = ""  # what Vitascope calls the folder or repository
    usage: list[UsageExample] = field(default_factory=list)
    preprocessing: str = ""  # for exported models: from an image file to the network's input
    temperature: float = 1.0  # for exported models: of the run; divides the logits

    @property
    def image_size(self) -> tuple[int, int]:
        """Rows and columns."""
        size = self.settings["model.img_size"]
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    @property
    def shown_settings(self) -> list[tuple[str, str]]:
        return [(key, str(self.settings[key])) for key in SHOWN_SETTINGS if key in self.settings]

    @property
    def augmentation(self) -> str:
        prefix = "data.augment."
        policy = {k.removeprefix(prefix): v for k, v in self.settings.items() if k.startswith(prefix)}
        return AugmentConfig(**policy).description or "none"

    def format_markdown(self) -> str:
        return render_template("model_card.md.j2", card=self, max_class_names=MAX_CLASS_NAMES)


def make_exported_model_card(model: Classifier, library: str, reference: str, *, on_hub: bool) -> ModelCard:
    """Collect the facts about an exported model from its run's files. `reference`: its folder or repository."""
    is_external = isinstance(model.run, ExternalWeightsRun)
    recipe = model.run.recipe
    settings = flatten_comparable_settings(recipe)
    if is_external:  # the recipe's other settings are not those of its training
        settings = {key: value for key, value in settings.items() if key.startswith("model.")}
    facts = {} if is_external else _collect_machine_facts(model)
    libraries = dict.fromkeys([library, "vitascope"])  # Vitascope loads all of them
    return ModelCard(
        name=recipe.name,
        num_parameters=count_parameters(model.config),
        num_tokens=model.config.num_tokens,
        settings=settings,
        classes=model.classes,
        results=_format_accuracy_paragraphs(model),
        origin=_describe_origin_of_weights(model),
        origin_code=json.dumps(facts, indent=1, default=str) if facts else "",
        origin_language="json",
        data_name="" if is_external else Path(recipe.data.name).name,
        starts_from_weights=bool(recipe.weights),
        library=library,
        reference=REF_PREFIXES["vitascope"][on_hub] + reference,
        usage=[
            UsageExample(name, format_usage_code(name, reference, model.info, on_hub=on_hub))
            for name in libraries
            if model.classes
        ],
        preprocessing=model.info.preprocessing_description,
        temperature=model.info.temperature,
    )


def format_usage_code(library: str, reference: str, model_info: ModelInfo, *, on_hub: bool = False) -> str:
    """Return Python code that loads a folder or a repository of the hub and predicts the class of an image."""
    code = USAGE_CODE[library].replace("PREPARE", _format_prepare_code(model_info))
    value = f"{model_info.temperature:.6g}"
    is_scaled = model_info.temperature != 1
    code = code.replace("SCALED", f" / {value}  # the run's temperature, as in predict" if is_scaled else "")
    code = code.replace("SCALE", f", temperature={value}" if is_scaled else "")
    return code.replace("REF", REF_PREFIXES[library][on_hub] + reference)


def _format_prepare_code(model_info: ModelInfo) -> str:
    """Return Pillow code that makes the pixels of `predict`. timm and transformers then only normalise them.

    Their own transforms resize before they crop, which shifts the picture by up to half a pixel, and ignore EXIF."""
    channels, rows, columns = model_info.stored
    stored_mode, mode = ("L" if count == 1 else "RGB" for count in (channels, model_info.model.in_chans))
    lines = [
        'image = ImageOps.exif_transpose(Image.open("photo.png")).convert("RGBA")',
        f'image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("{stored_mode}")',
        f"image = ImageOps.fit(image, ({columns}, {rows}), Image.Resampling.BICUBIC)  # crop the centre, resize",
    ]
    if model_info.is_resized_again:
        rows, columns = model_info.preparation.size
        lines.append(f"image = image.resize(({columns}, {rows}), Image.Resampling.BILINEAR)  # to the model's size")
    return "\n".join(lines if mode == stored_mode else [*lines, f'image = image.convert("{mode}")'])


def _format_accuracy_paragraphs(model: Classifier) -> list[Markdown]:
    if isinstance(model.run, ExternalWeightsRun):
        return ["Not measured."]
    lines = [PROBE_NOTE] if model.info.probe else []
    rows = [row for row in model.run.metrics if "val_accuracy" in row]
    if rows and model.weights_label.startswith("best"):
        best = max(rows, key=lambda row: row["knn_accuracy" if "knn_accuracy" in row else "val_accuracy"])
        lines.append(
            f"Validation accuracy {format_percent(best['val_accuracy'], 2)} (epoch {best['epoch']}, the best of "
            f"{len(rows)} epochs; chosen on these images)."
        )
    elif rows:
        precision = model.run.training_precision
        note = f", computed in {precision}" if precision not in (None, "float32") else ""
        lines.append(f"Validation accuracy {format_percent(rows[-1]['val_accuracy'], 2)} (last epoch{note}).")
    for entry in read_test_set_log(model.run):
        if entry.is_finished_classifier_result:
            data, split, views, weights = entry.settings
            views_text = f", {format_count(views, 'view')}" if views > 1 else ""
            evaluation_text = "first evaluation" if entry.use_count == 1 else f"evaluation number {entry.use_count}"
            lines.append(
                f"{split.capitalize()} accuracy on {escape_markdown(_shorten_absolute_path_to_name(data))}: "
                f"{format_percent(entry.result['accuracy'], 2)} ({weights} epoch's weights{views_text}; "
                f"{evaluation_text} on {'the test' if split == 'test' else 'these'} images)."
            )
    return ["\n".join(f"- {line}" for line in lines) or "Not measured yet. Measure it with `vitascope evaluate`."]


def _describe_origin_of_weights(model: Classifier) -> Markdown:
    if isinstance(model.run, ExternalWeightsRun):
        weights = format_markdown_inline_code(_shorten_absolute_path_to_name(model.run.model_ref))
        return f"Weights: {weights}. Converted by Vitascope."
    recipe = model.run.recipe
    weights = format_markdown_inline_code(_shorten_absolute_path_to_name(recipe.weights)) if recipe.weights else ""
    return (
        f"Trained by Vitascope: recipe {format_markdown_inline_code(recipe.name)}, data "
        f"{format_markdown_inline_code(_shorten_absolute_path_to_name(recipe.data.name))}, "
        f"{recipe.train.epochs * recipe.data.passes_per_epoch} epochs, seed {recipe.train.seed}, "
        f"{f'starting from {weights}' if weights else 'from scratch'}."
    )


def _collect_machine_facts(model: Classifier) -> dict[str, Any]:
    machine = model.run.machine
    return {name: value for name in ("commit", "versions", "training_images") if (value := machine.get(name))}


def _shorten_absolute_path_to_name(path_or_name: str) -> str:
    """Return a path's last part: the full path exists only on this machine."""
    return Path(path_or_name).name if Path(path_or_name).is_absolute() else path_or_name
