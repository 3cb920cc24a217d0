"""Compare an exported file's outputs with the model's; reject a file that differs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitascope.data.preparation import Preparation
from vitascope.data.source import Split
from vitascope.errors import UserError
from vitascope.evaluation.plain import apart
from vitascope.explain.maps import logits_and_maps, whole_forward
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images
from vitascope.training.hardware import exact_products, hardware_of

Ask = Callable[[Tensor], Sequence[Tensor]]  # prepared images -> logits, and maps if the file has them
Judged = tuple[Split, str]  # stored images with their classes, and which they are: validation or training

BATCHES = (1, 2, 7)  # several, to test the dynamic batch size
OUTPUTS = ("logits", "maps")


def images_to_compare(model: VisionTransformer, preparation: Preparation, judged: Judged | None) -> tuple[Images, str]:
    """Return images to fill the batches, and their description; random images if the run's are not available."""
    wanted = sum(BATCHES)
    if judged is None:
        chance = torch.Generator().manual_seed(0)
        return torch.randn(wanted, model.config.in_chans, *model.config.image_shape, generator=chance), "random"
    split, words = judged
    images = preparation(split.evenly(wanted).images)
    return images[torch.arange(wanted) % len(images)], words


def differences(model: VisionTransformer, ask: Ask, images: Images) -> dict[str, float]:
    """Return the largest difference of each output, relative to the model's maximum, over several batch sizes."""
    batches = images.split(BATCHES)
    found = [torch.cat(parts) for parts in zip(*(ask(batch) for batch in batches), strict=True)]
    truth = [torch.cat(parts) for parts in zip(*(_truth(model, batch, len(found)) for batch in batches), strict=True)]
    return {name: apart(*pair) for name, *pair in zip(OUTPUTS, found, truth, strict=False)}


def refuse_unfaithful(apart: dict[str, float], most: float) -> None:
    for name, far in apart.items():
        if not far <= most:
            raise UserError(
                f"The exported {name} differ from the model's (relative error {far:.1e}, allowed: {most:.0e}). "
                "No file was written. Please report this, with the model's settings."
            )


@torch.no_grad()
def _truth(model: VisionTransformer, images: Images, outputs: int) -> Sequence[Tensor]:
    """Compute the expected outputs independently of the file: all tokens, and maps recorded at the fused attention."""
    images = images.to(next(model.parameters()).device)
    with exact_products(hardware_of(model)):
        if outputs == 1:
            return (whole_forward(model, images).cpu(),)
        logits, maps = logits_and_maps(model, images)
        return logits.cpu(), torch.stack(maps, dim=1).cpu()
