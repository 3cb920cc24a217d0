"""`python -m benchmarks.fewer_tokens MODEL --images FOLDER`: cost and benefit of token merging and dropping.

MODEL is a run or pretrained weights. The same images are classified with all tokens and with fewer tokens, alternating.
Reported are FLOPs, images per second, the fraction of unchanged predictions, and for a run the held-out accuracy.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.records import Row, write_record
from benchmarks.timing import synchronize_device
from vitascope import Classifier, open_model
from vitascope.inference.prediction import load_or_convert_input_images
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.run.images import try_to_sample_run_images

TokenReduction = dict[str, int]  # merge_tokens or drop_tokens -> tokens per block; empty: no reduction


def list_token_reductions(num_tokens: int, depth: int) -> list[TokenReduction]:
    """No reduction, and reductions per block that remove about 1/8, 1/4, 1/2 and 3/4 of the tokens in total."""
    counts = sorted({max(1, round(fraction * num_tokens / depth)) for fraction in (1 / 8, 1 / 4, 1 / 2, 3 / 4)})
    return [{}, *({name: count} for name in ("merge_tokens", "drop_tokens") for count in counts)]


@torch.no_grad()
def measure_token_reductions(
    model: Classifier, images: torch.Tensor, labels: torch.Tensor | None, num_rounds: int, batch_size: int
) -> list[Row]:
    device = model.device.type
    reductions = list_token_reductions(model.config.num_patches, model.config.depth)
    models = [model.with_token_reduction(**({"merge_tokens": 0, "drop_tokens": 0} | each)) for each in reductions]
    logits: list[list[torch.Tensor]] = [[] for _ in reductions]
    times: list[list[float]] = [[] for _ in reductions]
    for round_index in range(num_rounds + 1):  # the first round warms up and gives the predictions
        for batch_index, batch in enumerate(images.split(batch_size)):
            # Every batch with every reduction, in rotating order, so that noise affects all equally.
            for index in ((batch_index + offset) % len(reductions) for offset in range(len(reductions))):
                synchronize_device(device)
                start = time.perf_counter()
                batch_logits = models[index](batch)
                synchronize_device(device)
                if round_index:
                    times[index].append((time.perf_counter() - start) / len(batch))
                else:
                    logits[index].append(batch_logits.float().cpu())
    return [
        _make_row(
            models[index], settings, torch.cat(logits[index]), torch.cat(logits[0]), times[index], times[0], labels
        )
        for index, settings in enumerate(reductions)
    ]


def _make_row(
    model: Classifier,
    reduction: TokenReduction,
    logits: torch.Tensor,
    full_logits: torch.Tensor,
    seconds_per_image: list[float],
    full_seconds_per_image: list[float],
    labels: torch.Tensor | None,
) -> Row:
    row: Row = {"way": next(iter(reduction), "all tokens"), "per_block": next(iter(reduction.values()), 0)}
    row |= {"tokens_at_the_end": model.config.num_tokens - sum(model.config.num_removed_per_block)}
    row |= {"gflops": round(count_forward_flops_per_image(model.config) / 1e9, 4)}
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
    parser.add_argument("--images", help="folder of images; default: the run's held-out images")
    parser.add_argument("--most", type=int, default=1000, help="maximum number of images")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = open_model(args.model, device=args.device)
    if args.images:
        stored, labels = load_or_convert_input_images(args.images, model.stored_shape).images[: args.most], None
    else:
        sample = try_to_sample_run_images(model.run, model.info, args.most)
        if sample is None:
            raise SystemExit("The run's images cannot be found. Give --images FOLDER.")
        stored, labels = sample[0].images, sample[0].labels
    images = model.preprocessing(stored).to(model.device)
    write_record(
        args.out,
        args.commit,
        command=f"python -m benchmarks.fewer_tokens MODEL{' --images FOLDER' if args.images else ''} "
        f"--most {args.most} --batch {args.batch} --rounds {args.rounds}",
        model=Path(args.model).name,
        images=len(images),
        pixels=list(images.shape[1:]),
        device=model.device.type,
        rows=measure_token_reductions(model, images, labels, args.rounds, args.batch),
    )
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
