"""`make bench`: a forward pass and a training step, ours beside timm's, float32 and eager, on this CPU."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import ratio, seconds_in_turns
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.run.machine import record_of_machine
from vitascope.weights.agreement import timm_twin

SHAPES = {"192×12": (192, 12, 3), "256×8": (256, 8, 4), "384×7": (384, 7, 6)}
RECORD = Path(__file__).parent.parent / "results" / "bench-cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RECORD)
    asked = parser.parse_args()
    rows = [row for name in SHAPES for row in measure(name, asked.batch, asked.rounds)]
    record = {"name": "bench-cpu", "command": "make bench", "batch": asked.batch, "rounds": asked.rounds}
    record |= {"img_size": 32, "patch_size": 4, "precision": "float32, eager", "rows": rows} | record_of_machine()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Record: {asked.out}")


def measure(name: str, batch: int, rounds: int) -> list[dict[str, object]]:
    """Ours, timm's, and timm's a second time: the second shows how much of a difference is noise."""
    width, depth, heads = SHAPES[name]
    config = ModelConfig(img_size=32, patch_size=4, num_classes=10, embed_dim=width, depth=depth, num_heads=heads)
    models = {"timm": timm_twin(config), "timm again": timm_twin(config), "ours": VisionTransformer(config)}
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    rows = []
    for kind, calls in (
        ("forward", {who: forward(model, images) for who, model in models.items()}),
        ("training step", {who: training_step(model, images, labels) for who, model in models.items()}),
    ):
        for model in models.values():
            model.train(kind == "training step")
        times = seconds_in_turns(calls, rounds)
        speeds = {who: round(batch / statistics.median(seconds), 1) for who, seconds in times.items()}
        faster = {who: round(ratio(times["timm"], times[who]), 3) for who in ("ours", "timm again")}
        rows.append({"model": name, "what": kind, "images_per_second": speeds, "times_timm": faster})
        print(
            f"{name:>7}  {kind:<14} timm {speeds['timm']:>6.1f}  ours {speeds['ours']:>6.1f} images/s   "
            f"ours {faster['ours']:.2f}× timm   (timm again {faster['timm again']:.2f}×)"
        )
    return rows


def forward(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def call() -> torch.Tensor:
        return model(images)

    return call


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def call() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


if __name__ == "__main__":
    main()
