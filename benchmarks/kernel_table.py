"""`python -m benchmarks.kernel_table`: measure the fastest kernels of recipes on this GPU, for the built-in table.

For each recipe, the training batch (compiled and not) and the batches of `open_model(fast=True)` are measured.
The results are merged into the table. Known shapes of this GPU and torch version are only measured again with --again.
"""

import argparse
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch

from vitascope.errors import UserError
from vitascope.inference.fast import CudaGraphInference, make_bfloat16_inference_workload
from vitascope.inference.hardware import choose_or_check_device
from vitascope.inference.kernel_choice import (
    SHIPPED_TABLE_PATH,
    KernelTable,
    KernelWorkload,
    make_kernel_key,
    make_layer_calls_for_kernel_choice,
    measure_fastest_kernel,
    read_kernel_table_or_empty,
)
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.run.files import write_json
from vitascope.training.hardware import choose_precision
from vitascope.training.initial_weights import STAGE_PREFIX, read_first_stage_recipe
from vitascope.training.prepare import make_training_workload

UNLIMITED_IMAGES = 10**9  # no recipe's batch is larger than its data


def find_model_config(recipe: Recipe) -> ModelConfig:
    """Return the model of the recipe or of its earlier stage; a recipe with pretrained weights is an error."""
    if recipe.weights and not recipe.weights.startswith(STAGE_PREFIX):
        raise UserError(f"{recipe.name} takes its model from {recipe.weights}. Choose recipes that define their model.")
    return read_first_stage_recipe(recipe).model if recipe.weights and recipe.model == ModelConfig() else recipe.model


def list_kernel_uses(recipe: Recipe, model: VisionTransformer) -> Iterator[tuple[VisionTransformer, KernelWorkload]]:
    """List every model and workload for which training and fast inference of this recipe choose kernels."""
    precision = recipe.train.precision
    precision = choose_precision("cuda", model) if precision == "auto" else precision
    for compiled in (False, True):  # equal except for norms, which the compiler fuses
        yield model, make_training_workload(recipe, UNLIMITED_IMAGES, getattr(torch, precision), compiled)
    inference = CudaGraphInference(deepcopy(model).eval())
    for size in inference.batch_sizes:
        yield inference.model, make_bfloat16_inference_workload(size)


def measure_kernel_choices(recipe: Recipe, known_choices: KernelTable) -> KernelTable:
    """Measure the fastest kernel for every unknown shape of the recipe."""
    torch.manual_seed(0)
    model, choices = VisionTransformer(find_model_config(recipe)).cuda().train(), {}
    for used_model, workload in list_kernel_uses(recipe, model):
        for layer in make_layer_calls_for_kernel_choice(used_model, workload).values():
            key = str(make_kernel_key(layer, workload))
            if key not in known_choices and key not in choices:
                choices[key] = measure_fastest_kernel(layer, workload)
                print(f"{choices[key]:10s} {key}", flush=True)
    return choices


def write_kernel_choices(path: Path, choices: KernelTable) -> None:
    """Write the table with sorted keys, so that a change shows as few lines."""
    write_json(path, dict(sorted(choices.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", required=True, metavar="RECIPE", help="names or paths")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings for all recipes")
    parser.add_argument("--out", type=Path, default=SHIPPED_TABLE_PATH, help="the table to extend")
    parser.add_argument("--again", action="store_true", help="also measure known shapes")
    args = parser.parse_args()
    try:
        recipes = [read_recipe(name, args.set) for name in args.recipes]
        choose_or_check_device("cuda")
        table = read_kernel_table_or_empty(args.out)
        for recipe in recipes:
            table |= measure_kernel_choices(recipe, {} if args.again else table)
            write_kernel_choices(args.out, table)  # after each recipe, so that an interruption loses little
    except UserError as error:
        parser.error(str(error))
    print(f"{len(table)} choices: {args.out}")


if __name__ == "__main__":
    main()
