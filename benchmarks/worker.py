"""Time one implementation in its own process: print 'ready', then run as many calls as each input line says.

Each library has its own process, so that its memory, threads and compilers do not affect the others.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.contenders import MODEL_BUILDERS, SHAPES
from benchmarks.timing import synchronize_device
from vitascope import ModelConfig
from vitascope.inference.hardware import set_malloc_to_keep_memory

TimedCall = Callable[[], object]
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
    args = parser.parse_args()
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries may print; the parent reads only the replies
    if args.threads:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    call = build_timed_call(args)
    call()
    synchronize_device(args.device)
    print(json.dumps({"ready": round(time.perf_counter() - start, 2)}), file=replies, flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start = time.perf_counter()
        for _ in range(int(line)):
            call()
        synchronize_device(args.device)
        print(json.dumps((time.perf_counter() - start) / int(line)), file=replies, flush=True)
    print(json.dumps({"peak_bytes": get_peak_bytes(args.device)}), file=replies, flush=True)


def build_timed_call(args: argparse.Namespace) -> TimedCall:
    """Build the timed call. Vitascope runs as in `vitascope`, other libraries as their users would run them."""
    shape = SHAPES[args.shape]
    if args.library == "ours" and args.device == "cpu":
        set_malloc_to_keep_memory()
    if args.task in ("step", "recipe"):
        from benchmarks.whole_step import build_training_step, make_cifar10_config

        return build_training_step(make_cifar10_config() if args.task == "recipe" else shape, args)
    model = MODEL_BUILDERS[args.library](shape).to(args.device)
    images, labels = _make_random_batch(shape, args.batch, args.device)
    if args.task == "fast":
        return build_fast_inference_call(model, images)
    dtype = getattr(torch, args.precision)
    build_call = build_training_call if args.task == "train" else build_inference_call
    return build_call(
        model, images, labels, torch.autocast(args.device, dtype, enabled=dtype != torch.float32), args.compiled
    )


def build_training_call(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, autocast: torch.autocast, compiled: bool
) -> TimedCall:
    """Build a training step: forward, cross-entropy, backward, fused AdamW."""
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
) -> TimedCall:
    del labels
    model.eval()
    forward = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def call() -> torch.Tensor:
        with autocast:
            return forward(images)

    return call


def build_fast_inference_call(model: nn.Module, images: torch.Tensor) -> TimedCall:
    """Build inference as after `vitascope.open_model(run, fast=True)`."""
    from vitascope import VisionTransformer
    from vitascope.inference.fast import build_fastest_feature_function

    if not isinstance(model, VisionTransformer):
        raise TypeError("fast inference is only for Vitascope models")
    pooled, _, _ = build_fastest_feature_function(model.eval(), full_batch_size=len(images))

    @torch.inference_mode()
    def call() -> torch.Tensor:
        return model.head(pooled(images))

    return call


class RandomBatch(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def _make_random_batch(model_config: ModelConfig, batch_size: int, device: str) -> RandomBatch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, *model_config.image_shape, generator=generator)
    labels = torch.randint(model_config.num_classes, (batch_size,), generator=generator)
    return RandomBatch(images.to(device), labels.to(device))


def get_peak_bytes(device: str) -> int:
    """Return the peak bytes: allocated by torch on a GPU, resident size of the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
