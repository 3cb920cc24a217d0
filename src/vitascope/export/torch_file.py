"""Export with torch.export (.pt2): dynamic batch size, usable without Vitascope, verified against the model."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from vitascope.export.answering import answering, any_batch, example
from vitascope.export.description import FILE, described
from vitascope.export.faithful import Ask, Judged, differences, images_to_compare, refuse_unfaithful
from vitascope.export.speed import compare_speed
from vitascope.export.written import Written, check_place, quietly
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_whole
from vitascope.weights.facts import ModelFacts

ENDING = ".pt2"
TOLERANCE = 1e-5  # relative to the largest logit


def write_torch(
    model: VisionTransformer, facts: ModelFacts, path: Path, *, run: str = "", judged: Judged | None = None
) -> Written:
    """Write the file: prepared images -> logits. Its metadata is in vitascope.json inside the file."""
    check_place(path, ENDING)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        trace(model, file, described(facts, run))
        ask = ask_torch(file)
        images, which = images_to_compare(model, facts.preparation, judged)
        apart = differences(model, ask, images)
        refuse_unfaithful(apart, TOLERANCE)
        speed = compare_speed(model, {"torch.export": ask})
        content = file.read_bytes()
    write_whole(path, content)
    return Written(path, "torch.export", len(content), apart, which, speed)


def trace(model: VisionTransformer, file: Path, words: dict[str, str]) -> None:
    """Trace the model with torch.export, without references to our source code."""
    twin = answering(model)
    with quietly():
        program = torch.export.export(twin, (example(twin),), dynamic_shapes=any_batch())
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        torch.export.save(program, file, extra_files={FILE: json.dumps(words, ensure_ascii=False)})


def ask_torch(file: Path) -> Ask:
    with quietly():
        module = torch.export.load(file).module()

    @torch.no_grad()
    def ask(images: Tensor) -> Sequence[Tensor]:
        return [module(images)]

    return ask
