"""Time one implementation in its own process: print 'ready', then run as many calls as each input line says.

Each library has its own process, so that its memory, threads and compilers do not affect the others.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.contenders import MODEL_BUILDERS, SHAPES
from benchmarks.timing import synchronize_device
from vitascope import ModelConfig
from vitascope.training.hardware import keep_freed_memory

TASKS = ("train", "infer", "step", "recipe", "fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=MODEL_BUILDERS)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    asked = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print; the parent reads only our answers
    if asked.threads:
        torch.set_num_threads(asked.threads)
    start = time.perf_counter()
    call = build_timed_call(asked)
    call()
    synchronize_device(asked.device)
    print(json.dumps({"ready": round(time.perf_counter() - start, 2)}), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start = time.perf_counter()
        for _ in range(int(line)):
            call()
        synchronize_device(asked.device)
        print(json.dumps((time.perf_counter() - start) / int(line)), file=answers, flush=True)
    print(json.dumps({"peak_bytes": get_peak_bytes(asked.device)}), file=answers, flush=True)


def build_timed_call(args: argparse.Namespace) -> Callable[[], object]:
    """Build the timed call. Ours runs as in `vitascope`, the others as their users would run them."""
    shape = SHAPES[args.shape]
    if args.library == "ours" and args.device == "cpu":
        keep_freed_memory()
    if args.task in ("step", "recipe"):
        from benchmarks.whole_step import build_training_step, make_cifar10_config

        return build_training_step(make_cifar10_config() if args.task == "recipe" else shape, args)
    model = MODEL_BUILDERS[args.library](shape).to(args.device)
    images, labels = _make_random_batch(shape, args.batch, args.device)
    if args.task == "fast":
        return build_fast_inference_call(model, images)
    dtype = getattr(torch, args.precision)
    made = build_training_call if args.task == "train" else build_inference_call
    return made(
        model, images, labels, torch.autocast(args.device, dtype, enabled=dtype != torch.float32), args.compiled
    )


def build_training_call(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, autocast: torch.autocast, compiled: bool
) -> Callable[[], object]:
    """Forward, cross-entropy, backward, fused AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model

    def call() -> None:
        with autocast:
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def build_inference_call(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, autocast: torch.autocast, compiled: bool
) -> Callable[[], object]:
    del labels
    model.eval()
    forward = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def call() -> torch.Tensor:
        with autocast:
            return forward(images)

    return call


def build_fast_inference_call(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    """As after `vitascope.load(run, fast=True)`."""
    from vitascope import VisionTransformer
    from vitascope.evaluation.fast import build_fastest_feature_function

    if not isinstance(model, VisionTransformer):
        raise TypeError("fast inference is only for Vitascope models")
    pooled, _, _ = build_fastest_feature_function(model.eval(), full_batch_size=len(images))

    @torch.inference_mode()
    def call() -> torch.Tensor:
        return model.head(pooled(images))

    return call


def _make_random_batch(model_config: ModelConfig, batch_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, *model_config.image_shape, generator=generator)
    return images.to(device), torch.randint(model_config.num_classes, (batch_size,), generator=generator).to(device)


def get_peak_bytes(device: str) -> int:
    """Peak bytes: allocated by torch on a GPU, resident size of the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
