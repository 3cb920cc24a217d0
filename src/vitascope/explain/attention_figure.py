"""Draw the attention maps of one image, for `Classifier.plot_attention`."""

import torch
from matplotlib.figure import Figure

from vitascope.errors import UserError
from vitascope.explain.attribution import AttributionInputs
from vitascope.explain.figures import (
    ExplainRequest,
    check_and_select_maps,
    draw_attention_of_selected_heads,
    make_unique_file_stems,
)
from vitascope.explain.maps import PatchPosition, denormalize_images, get_token_layout
from vitascope.inference.classifier import Classifier
from vitascope.inference.hardware import disable_tf32_for_float32, make_float32_inference_hardware
from vitascope.inference.prediction import ImagesInput, LoadedImages, load_or_convert_input_images
from vitascope.number_format import format_percent


def draw_attention_of_one_image(
    classifier: Classifier,
    image: ImagesInput,
    blocks: list[int] | None,
    heads: list[int] | None,
    query: tuple[int, int] | None,
) -> Figure:
    """Draw a row of maps per block, and a column per head. Blocks, heads and the query patch are counted from 1."""
    loaded = load_or_convert_input_images(image, classifier.stored_shape)
    if len(loaded.images) != 1:
        raise UserError(f"plot_attention draws one image, but {len(loaded.images):,} were given. Choose one of them.")
    images = classifier.preprocessing(loaded.images.to(classifier.device))
    unused_target = torch.zeros(1, dtype=torch.long)  # attention does not depend on a class
    inputs = AttributionInputs(classifier.model, images, unused_target, get_token_layout(classifier.model))
    request = ExplainRequest(blocks=blocks, heads=heads, query_patch=PatchPosition(*query) if query else None)
    with disable_tf32_for_float32(make_float32_inference_hardware(classifier.model)):
        selection = check_and_select_maps(request, inputs)
    pixels = denormalize_images(classifier.preprocessing, images.cpu())[0]
    return draw_attention_of_selected_heads(inputs, 0, selection, pixels, _make_image_title(classifier, loaded))


def _make_image_title(classifier: Classifier, loaded: LoadedImages) -> str:
    name = make_unique_file_stems(loaded)[0] if loaded.files else "image"
    if not classifier.classes:
        return name
    best = classifier.predict(loaded.images)[0]
    return f"{name}\nprediction: {best.label} ({format_percent(best.probability)})"
