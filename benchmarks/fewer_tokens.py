"""`python -m benchmarks.fewer_tokens MODEL --images FOLDER`: cost and benefit of token merging and dropping.

MODEL is a run or pretrained weights. The same images are classified with all tokens and with fewer tokens, alternating.
Reported are FLOPs, images per second, the fraction of unchanged predictions, and for a run the held-out accuracy.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.records import write_record
from benchmarks.timing import synchronize_device
from vitascope import load
from vitascope.evaluation.eval_data import sample_run_images
from vitascope.evaluation.prediction import convert_to_stored_images
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.model.anatomy import count_flops


def list_token_reductions(num_tokens: int, depth: int) -> list[dict[str, int]]:
    """No reduction, and reductions per block that remove about 1/8, 1/4, 1/2 and 3/4 of the tokens in total."""
    each = sorted({max(1, round(share * num_tokens / depth)) for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4)})
    return [{}, *({name: count} for name in ("merge_tokens", "drop_tokens") for count in each)]


@torch.no_grad()
def measure_token_reductions(
    model: TrainedTransformer, images: torch.Tensor, labels: torch.Tensor | None, num_rounds: int, batch_size: int
) -> list[dict[str, Any]]:
    whole, device = model.config, next(model.parameters()).device.type
    found = list_token_reductions(whole.num_patches, whole.depth)
    logits: list[list[torch.Tensor]] = [[] for _ in found]
    times: list[list[float]] = [[] for _ in found]
    for number in range(num_rounds + 1):  # the first round warms up and gives the predictions
        for turn, some in enumerate(images.split(batch_size)):
            # Every batch with every method, in rotating order, so that noise affects all methods equally.
            for way in ((turn + place) % len(found) for place in range(len(found))):
                model.set_token_reduction(**({"merge_tokens": 0, "drop_tokens": 0} | found[way]))
                synchronize_device(device)
                start = time.perf_counter()
                answer = model(some)
                synchronize_device(device)
                if number:
                    times[way].append((time.perf_counter() - start) / len(some))
                else:
                    logits[way].append(answer.float().cpu())
    return [
        _make_row(model, settings, torch.cat(logits[way]), torch.cat(logits[0]), times[way], times[0], labels)
        for way, settings in enumerate(found)
    ]


def _make_row(
    model: TrainedTransformer,
    reduction: dict[str, int],
    logits: torch.Tensor,
    full_logits: torch.Tensor,
    seconds_per_image: list[float],
    full_seconds_per_image: list[float],
    labels: torch.Tensor | None,
) -> dict[str, Any]:
    model.set_token_reduction(**({"merge_tokens": 0, "drop_tokens": 0} | reduction))
    row: dict[str, Any] = {"way": next(iter(reduction), "all tokens"), "per_block": next(iter(reduction.values()), 0)}
    row |= {"tokens_at_the_end": model.config.num_tokens - sum(model.config.num_removed_per_block)}
    row |= {"gflops": round(count_flops(model.config) / 1e9, 4)}
    row |= {"same_answers": round((logits.argmax(1) == full_logits.argmax(1)).float().mean().item(), 4)}
    row |= {"images_per_second": round(1 / median(seconds_per_image), 1)}
    row |= {
        "times_as_fast": round(median(a / b for a, b in zip(full_seconds_per_image, seconds_per_image, strict=True)), 3)
    }
    if labels is not None:
        row["accuracy"] = round((logits.argmax(1) == labels).float().mean().item(), 4)
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--images", help="folder of images; default: the run's own held-out images")
    parser.add_argument("--most", type=int, default=1000, help="maximum number of images")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    model = load(asked.model, device=asked.device)
    if asked.images:
        stored, labels = convert_to_stored_images(asked.images, model.info.stored).images[: asked.most], None
    else:
        own = sample_run_images(model.run, model.info, asked.most)
        if own is None:
            raise SystemExit("The run's images cannot be found. Give --images FOLDER.")
        stored, labels = own[0].images, own[0].labels
    images = model.info.preparation(stored).to(next(model.parameters()).device)
    write_record(
        asked.out,
        asked.commit,
        command=f"python -m benchmarks.fewer_tokens MODEL{' --images FOLDER' if asked.images else ''} "
        f"--most {asked.most} --batch {asked.batch} --rounds {asked.rounds}",
        model=Path(asked.model).name,
        images=len(images),
        pixels=list(images.shape[1:]),
        device=next(model.parameters()).device.type,
        rows=measure_token_reductions(model, images, labels, asked.rounds, asked.batch),
    )
    print(f"Record: {asked.out}")


if __name__ == "__main__":
    main()
