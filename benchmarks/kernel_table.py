"""`python -m benchmarks.kernel_table`: measure the fastest kernels of recipes on this GPU, for the built-in table.

For each recipe, the training batch (compiled and not) and the batches of `load(fast=True)` are measured. The results
are merged into the table. Known shapes of this GPU and torch version are only measured again with --again.
"""

import argparse
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch

from vitascope.errors import UserError
from vitascope.evaluation.fast import CudaGraphInference, make_inference_kernel_use
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.run.files import write_json
from vitascope.training.hardware import choose_device, choose_precision
from vitascope.training.initial_weights import STAGE_PREFIX, make_first_stage_recipe
from vitascope.training.kernel_choice import (
    SHIPPED_TABLE_PATH,
    KernelTable,
    KernelWorkload,
    list_kernel_layers,
    make_kernel_key,
    measure_fastest_kernel,
    read_kernel_table,
)
from vitascope.training.session import make_training_workload

UNLIMITED_IMAGES = 10**9  # no recipe's batch is larger than its data


def find_model_config(recipe: Recipe) -> ModelConfig:
    """The model of the recipe or of its earlier stage; pretrained weights would determine another one."""
    if recipe.weights and not recipe.weights.startswith(STAGE_PREFIX):
        raise UserError(
            f"{recipe.name} takes its model from {recipe.weights}. Choose recipes with a model of their own."
        )
    return make_first_stage_recipe(recipe).model if recipe.weights and recipe.model == ModelConfig() else recipe.model


def list_kernel_uses(recipe: Recipe, model: VisionTransformer) -> Iterator[tuple[VisionTransformer, KernelWorkload]]:
    """Every model and use for which training and fast inference of this recipe choose kernels."""
    precision = recipe.train.precision
    precision = choose_precision("cuda", model) if precision == "auto" else precision
    for compiled in (False, True):  # equal except for norms, which the compiler fuses
        yield model, make_training_workload(recipe, UNLIMITED_IMAGES, getattr(torch, precision), compiled)
    answers = CudaGraphInference(deepcopy(model).eval())
    for size in answers.batch_sizes:
        yield answers.model, make_inference_kernel_use(size)


def measure_kernel_choices(recipe: Recipe, known_choices: KernelTable) -> KernelTable:
    """The fastest kernel for every unknown shape of the recipe."""
    torch.manual_seed(0)
    model, found = VisionTransformer(find_model_config(recipe)).cuda().train(), {}
    for used, use in list_kernel_uses(recipe, model):
        for part in list_kernel_layers(used, use).values():
            key = str(make_kernel_key(part, use))
            if key not in known_choices and key not in found:
                found[key] = measure_fastest_kernel(part, use)
                print(f"{found[key]:10s} {key}", flush=True)
    return found


def write_kernel_choices(path: Path, choices: KernelTable) -> None:
    """With sorted keys, so that a change shows as few lines."""
    write_json(path, dict(sorted(choices.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", required=True, metavar="RECIPE", help="names or paths")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings for all recipes")
    parser.add_argument("--out", type=Path, default=SHIPPED_TABLE_PATH, help="the table to extend")
    parser.add_argument("--again", action="store_true", help="also measure known shapes")
    asked = parser.parse_args()
    try:
        recipes = [read_recipe(name, asked.set) for name in asked.recipes]
        choose_device("cuda")
        table = read_kernel_table(asked.out)
        for recipe in recipes:
            table |= measure_kernel_choices(recipe, {} if asked.again else table)
            write_kernel_choices(asked.out, table)  # after each recipe, so that an interruption loses little
    except UserError as error:
        parser.error(str(error))
    print(f"{len(table)} choices: {asked.out}")


if __name__ == "__main__":
    main()
