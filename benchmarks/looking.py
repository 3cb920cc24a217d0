"""`python -m benchmarks.looking`: cost of all attention maps of 256 images, relative to an unfused forward pass."""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.contenders import SHAPES
from benchmarks.records import write_record
from vitascope import VisionTransformer, attend
from vitascope.explain import attention_maps
from vitascope.explain.maps import BATCH_SIZE


@torch.no_grad()
def run_unfused_forward(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    """Run a forward pass with unfused attention softmax(QKᵀ)V, the reference for the cost of the maps."""
    tokens = model.embed(images)
    for part in model.blocks:
        block: Any = part
        query, key, value = block.attn.compute_queries_keys_values(block.norm1(tokens), model.rotation)
        tokens = tokens + block.attn.concat_and_project_heads(attend(query, key, value))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return model.forward_head(model.norm(tokens))


def measure_attention_map_cost(model: VisionTransformer, images: torch.Tensor, num_rounds: int = 7) -> list[float]:
    """Return the time of the maps divided by the time of an unfused forward pass, per round."""
    ratios = []
    for _ in range(num_rounds):
        times = [time.perf_counter()]
        for batch in images.split(BATCH_SIZE):
            run_unfused_forward(model, batch)
        times.append(time.perf_counter())
        attention_maps(model, images)
        times.append(time.perf_counter())
        ratios.append((times[2] - times[1]) / (times[1] - times[0]))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "explain-cost.json")
    args = parser.parse_args()
    model = VisionTransformer(SHAPES["256×8"]).eval()
    ratios = measure_attention_map_cost(model, torch.randn(256, 3, 32, 32))
    times = round(median(ratios), 2)
    write_record(
        args.out,
        args.commit,
        command="python -m benchmarks.looking",
        shape="256×8",
        images=256,
        times_a_written_out_forward=times,
        rounds=[round(ratio, 3) for ratio in ratios],
    )
    print(f"All maps cost {times} times an unfused forward pass. Record: {args.out}")


if __name__ == "__main__":
    main()
