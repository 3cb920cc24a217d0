"""`python -m benchmarks.kernel_table`: measure the fastest kernels of recipes on this GPU, for the table that ships.

For each recipe: its training batch, compiled and not, and the batches of `load(fast=True)`. The results are merged into
the table; shapes that it has for this GPU and torch version are not measured again, unless --again says so.
"""

import argparse
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch

from vitascope.errors import UserError
from vitascope.evaluation.fast import RecordedAnswers, answering_use
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.run.files import write_json
from vitascope.training.hardware import choose_device, choose_precision
from vitascope.training.kernel_choices import SHIPPED, Choices, read_choices
from vitascope.training.kernels import Use, list_parts, make_key, measure_fastest
from vitascope.training.session import training_use
from vitascope.training.stages import STAGE, stage_before

ALL_IMAGES = 10**9  # no recipe's batch is larger than its data


def find_model(recipe: Recipe) -> ModelConfig:
    """The recipe's own, or of the stage before it; weights from outside would decide on another."""
    if recipe.weights and not recipe.weights.startswith(STAGE):
        raise UserError(f"{recipe.name} takes its model from {recipe.weights}: name recipes that have their own.")
    return stage_before(recipe).model if recipe.weights and recipe.model == ModelConfig() else recipe.model


def list_uses(recipe: Recipe, model: VisionTransformer) -> Iterator[tuple[VisionTransformer, Use]]:
    """Every model and use that training and fast answers of this recipe choose kernels for."""
    precision = recipe.train.precision
    precision = choose_precision("cuda", model) if precision == "auto" else precision
    for compiled in (False, True):  # the same but for norms, which are not chosen where a compiler fuses them
        yield model, training_use(recipe, ALL_IMAGES, getattr(torch, precision), compiled)
    answers = RecordedAnswers(deepcopy(model).eval())
    for size in answers.sizes:
        yield answers.model, answering_use(size)


def measure_choices(recipe: Recipe, known: Choices) -> Choices:
    """The fastest kernel for every shape of the recipe that is not known."""
    torch.manual_seed(0)
    model, found = VisionTransformer(find_model(recipe)).cuda().train(), {}
    for used, use in list_uses(recipe, model):
        for part in list_parts(used, use).values():
            key = str(make_key(part, use))
            if key not in known and key not in found:
                found[key] = measure_fastest(part, use)
                print(f"{found[key]:10s} {key}", flush=True)
    return found


def write_choices(path: Path, choices: Choices) -> None:
    """With sorted keys, so that a change shows as few lines."""
    write_json(path, dict(sorted(choices.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", required=True, metavar="RECIPE", help="names or paths")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings for all recipes")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="the table, merged with what it has")
    parser.add_argument("--again", action="store_true", help="also measure what the table has")
    asked = parser.parse_args()
    try:
        recipes = [read_recipe(name, asked.set) for name in asked.recipes]
        choose_device("cuda")
        table = read_choices(asked.out)
        for recipe in recipes:
            table |= measure_choices(recipe, {} if asked.again else table)
            write_choices(asked.out, table)  # after each: a cut-off session keeps what it has
    except UserError as error:
        parser.error(str(error))
    print(f"{len(table)} choices: {asked.out}")


if __name__ == "__main__":
    main()
