"""`python -m benchmarks.odd_size`: sheet D, question 9: a 28×28 image for timm's ViT, Vitascope's ViT and a CNN.

For each model: the result for one image, and the fraction of pixels with a non-zero gradient.
"""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.__main__ import RESULTS_FOLDER
from vitascope import VisionTransformer
from vitascope.run.files import write_json
from vitascope.run.machine import collect_machine_info
from vitascope.weights.adaptation import adapt
from vitascope.weights.model_info import WeightsMetadata
from vitascope.weights.pretrained import build_pretrained_from_state_dict

IMAGE_SIZE = 28


def compute_used_pixel_fraction(model: nn.Module, image: torch.Tensor) -> float:
    """Return the fraction of pixels that affect the output."""
    image = image.clone().requires_grad_()
    model(image).square().sum().backward()
    return 0.0 if image.grad is None else (image.grad.abs().sum(1) > 0).float().mean().item()


def measure_model(
    model_name: str, model: nn.Module, image_size: int, num_channels: int, patch_grid: list[int] | None
) -> dict[str, Any]:
    image = torch.randn(1, num_channels, image_size, image_size, generator=torch.Generator().manual_seed(0))
    row: dict[str, Any] = {"who": model_name, "image": image_size, "grid": patch_grid}
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(image)
    except Exception as error:  # shown as a user would see it
        return row | {"answer": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    row |= {"answer": "a prediction", "gflops": round(counter.get_total_flops() / 1e9, 3)}
    return row | {"pixels_seen": round(compute_used_pixel_fraction(model, image), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="vit_base_patch16_224")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "odd-size.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    timm_model = timm.create_model(args.architecture, num_classes=10)
    for weight in timm_model.parameters():  # timm initialises its classifier to 0, which blocks gradients
        nn.init.normal_(weight, std=0.02)
    changed = timm.create_model(args.architecture, num_classes=10, img_size=IMAGE_SIZE, in_chans=1)
    for weight in changed.parameters():
        nn.init.normal_(weight, std=0.02)
    heads = timm_model.blocks[0].attn.num_heads  # pyright: ignore
    pretrained = build_pretrained_from_state_dict(
        timm_model.state_dict(), args.architecture, WeightsMetadata({"num_heads": heads, "img_size": 224})
    )
    adapted_model: VisionTransformer = adapt(pretrained, img_size=IMAGE_SIZE, patch_size=4, in_chans=1).build_model()
    cnn = timm.create_model("resnet18", num_classes=10, in_chans=1, zero_init_last=False)  # zeros would hide pixels
    rows = [
        measure_model(f"timm, {args.architecture} as it is", timm_model, IMAGE_SIZE, 3, [14, 14]),
        measure_model("the same, images resized up", timm_model, 224, 3, [14, 14]),
        measure_model(f"timm, img_size={IMAGE_SIZE}, in_chans=1", changed, IMAGE_SIZE, 1, [1, 1]),
        measure_model(
            f"adapted_model, img_size={IMAGE_SIZE}, patch_size=4, in_chans=1",
            adapted_model,
            IMAGE_SIZE,
            1,
            list(adapted_model.config.grid),
        ),
        measure_model("a CNN, timm's resnet18, in_chans=1", cnn, IMAGE_SIZE, 1, None),
    ]
    for one in rows:
        print(one)
    record = {"name": args.out.stem, "command": "python -m benchmarks.odd_size", "rows": rows}
    write_json(args.out, record | collect_machine_info(args.commit))
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
