"""Speed up prediction: compiled with CUDA graphs on a GPU, int8 or bfloat16 on a CPU.

On a CPU, int8 or bfloat16 is used only if it is measured to be faster and if the accuracy on the run's own images drops
by at most 0.2 percentage points. This check runs once; its result is stored in the run's fast.json.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitascope.evaluation.choosing import some_own_images
from vitascope.evaluation.plain import plain_copy
from vitascope.model.int8 import with_int8_products
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import Run
from vitascope.run.files import read_json, write_json
from vitascope.run.format_probe import answering_speedup
from vitascope.shapes import Features
from vitascope.training.hardware import hardware_of
from vitascope.training.kernels import Use, choose_kernels, use_kernels
from vitascope.training.scoring import answers, batch_for
from vitascope.weights.facts import ModelFacts

WORTH = 1.15  # minimum speed-up; below it float32 is used
MOST_LOST = 0.2  # percentage points of accuracy
CHECKED = 1000  # images
FEW = 32  # images; up to here a smaller CUDA graph is used


@dataclass(frozen=True)
class Fast:
    """The function that computes pooled features (None: the model itself), and a description."""

    pooled: Callable[[Tensor], Features] | None
    how: str


def make_fast(model: VisionTransformer, run: Run, facts: ModelFacts) -> Fast:
    quick, form, gain = quicker(model)
    if form is None:
        return Fast(
            None, f"float32: no other format is at least {WORTH} times as fast on this machine (best: {gain:.2f} times)"
        )
    if gain is None:
        return Fast(quick, form)
    lost = points_lost(model, quick, form, run, facts)
    if lost is None:
        return Fast(
            None, f"float32: the accuracy of {form} cannot be checked, because the run's images are not available"
        )
    if lost > MOST_LOST:
        return Fast(
            None, f"float32: {form} would lower the accuracy on the run's images by {lost:.1f} percentage points"
        )
    how = f"{form}: matrix products {gain:.1f} times as fast as float32, accuracy loss {lost:.1f} percentage points"
    return Fast(quick, how)


def quicker(
    model: VisionTransformer, many: int | None = None
) -> tuple[Callable[[Tensor], Features], str | None, float | None]:
    """Return a copy's fastest function for pooled features, its format, and on a CPU its speed-up.

    `many` is the size of full batches on a GPU, if known."""
    device = next(model.parameters()).device.type
    plain = plain_copy(model).to(next(model.parameters()).device)
    if device == "cuda":
        return RecordedAnswers(plain, many), "compiled, bfloat16, recorded as CUDA graphs", None
    if device != "cpu":
        return plain.pooled, None, 1.0
    gains = {form: answering_speedup(form, model.config.embed_dim, torch.get_num_threads()) for form in FORMS}
    form = max(gains, key=lambda name: gains[name])
    if gains[form] < WORTH:
        return plain.pooled, None, gains[form]
    return FORMS[form](plain), form, gains[form]


def points_lost(
    model: VisionTransformer, quick: Callable[[Tensor], Features], form: str, run: Run, facts: ModelFacts
) -> float | None:
    """Return the accuracy loss on the run's own images, in percentage points; None if they are not available.

    Test images are never used."""
    known = read_json(run.file("fast.json"))
    form += "".join(f", {name}={count}" for name, count in model.config.fewer.items())
    if form in known:
        return known[form]["points_lost"]
    found = some_own_images(run, facts, CHECKED)
    if found is None:
        return None
    some, _ = found
    right = []
    for pooled in (model.pooled, quick):
        features = answers(model, pooled, some.images, facts.preparation, hardware_of(model))
        with torch.no_grad():
            right.append((model.head(features).argmax(1) == some.labels).float().mean().item())
    lost = 100 * (right[0] - right[1])
    write_json(run.file("fast.json"), known | {form: {"points_lost": lost, "images": len(some)}})
    return lost


def answering_use(size: int) -> Use:
    """Return the use for which the kernels of a captured batch are chosen."""
    return Use(size, torch.bfloat16, training=False, compiled=True)


class RecordedAnswers:
    """Compiled model in CUDA graphs with static batch sizes: one image, a few, many."""

    def __init__(self, model: VisionTransformer, many: int | None = None) -> None:
        self.model = _narrow(model)
        self.sizes = sorted({1, FEW, many or batch_for(model, "cuda")})
        self.recordings: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Features:
        parts = []
        for some in images.split(self.sizes[-1]):
            size = next(size for size in self.sizes if size >= len(some))
            graph, inputs, output = self.recordings.get(size) or self._record(size, some)
            inputs[: len(some)].copy_(some)
            graph.replay()
            parts.append(output[: len(some)].to(torch.float32, copy=True))  # the next replay writes there again
        return torch.cat(parts)

    def _record(self, size: int, like: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        model = deepcopy(self.model)
        use_kernels(model, choose_kernels(model, answering_use(size)))
        compiled = torch.compile(model.pooled, dynamic=False)
        inputs = like.new_zeros(size, *like.shape[1:])

        def work() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return compiled(inputs)

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = work()
        self.recordings[size] = graph, inputs, output
        return self.recordings[size]


def _int8(model: VisionTransformer) -> Callable[[Tensor], Features]:
    """Use int8 in the blocks; the last block keeps float32 qkv if only the class token is read."""
    kept: set[nn.Module] = {model.head}
    if model.config.global_pool == "token":
        kept.add(model.blocks[-1].get_submodule("attn.qkv"))
    with_int8_products(model, kept)
    return model.pooled


def _bfloat16(model: VisionTransformer) -> Callable[[Tensor], Features]:
    narrow = _narrow(model)

    def pooled(images: Tensor) -> Features:
        with torch.autocast("cpu", torch.bfloat16):
            return narrow.pooled(images).float()

    return pooled


FORMS: dict[str, Callable[[VisionTransformer], Callable[[Tensor], Features]]] = {"int8": _int8, "bfloat16": _bfloat16}


def _narrow(model: VisionTransformer) -> VisionTransformer:
    """Convert linear and convolution weights to bfloat16; norms and embeddings keep their precision."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(torch.bfloat16)
    return model
