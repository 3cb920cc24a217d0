"""The contract of the training objectives: every entry of the dict keeps it."""

import math
from dataclasses import fields, is_dataclass

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.training.test_captured import check_recorded_as_plain
from tests.training.test_dino import DINO
from tests.training.test_mae import MAE
from tests.training.test_runs import build_state_and_run, check_goes_on_after_a_stop, check_refused
from tests.training.tiny import shared_run, untimed
from vitascope import UserError
from vitascope.data.config import AugmentConfig
from vitascope.data.sampling import select_step_draws
from vitascope.model.anatomy import list_stages
from vitascope.model.attention import UNFUSED_KERNEL
from vitascope.recipe.choices import (
    LABELLED_OBJECTIVE,
    OBJECTIVE_SECTIONS,
    OBJECTIVES,
    complete_augmentation_for_objective,
    load_objective,
)
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.training.hardware import count_train_flops_per_image
from vitascope.training.loader import make_epoch_plan
from vitascope.training.optim.schedule import compute_schedule_values

SETTINGS = {  # tiny, and without parts that need the whole batch
    "classify": {"data.augment.cutmix": 0.5},
    "dino": DINO | {"dino.batch_norm": False, "dino.teacher_momentum": 0.9},
    "mae": MAE | {"mae.pictures": 0},
    "simmim": {"train.objective": "simmim", "simmim.pictures": 0, "simmim.block_size": 1},
}
NUM_EMBEDDINGS = {"classify": 1, "dino": 2.5, "mae": 1, "simmim": 1}  # of a whole image; DINO: 2 + 2 local crops of 1/4
HEALTHY = {"dino": {"dino.batch_norm": True, "dino.teacher_momentum": 0.97, "dino.final_teacher_temperature": 0.04}}
BATCH_METRICS = ("prototypes_used",)  # of the mean distribution of a batch, so not a mean over images
FIRST = {name: fields(load_objective(name).config_class)[0].name for name in OBJECTIVE_SECTIONS}  # a setting of each
CHANGED = {"dino": 7}  # another value of it than the default
NEEDS_LABELS = ("train.patience=3", "train.distill=x", "train.patch_share=0.5", "data.balance=loss")
of_every_objective = pytest.mark.parametrize("name", OBJECTIVES)
without_labels = pytest.mark.parametrize("name", OBJECTIVE_SECTIONS)


def test_every_objective_has_tiny_settings_and_recipes() -> None:
    assert set(SETTINGS) == set(OBJECTIVES)
    for name in OBJECTIVE_SECTIONS:
        for data in ("digits", "cifar10"):
            assert f"{data}-{name}" in list_recipe_names()
            assert read_recipe(f"{data}-{name}").train.objective == name


@of_every_objective
def test_an_objective_names_itself_as_the_dict_does(name) -> None:
    objective = load_objective(name)
    assert objective.name == name and objective.loss_name and objective.metric_names[0] == "train_loss"
    assert is_dataclass(objective.config_class) == (name != LABELLED_OBJECTIVE)
    if objective.config_class:
        defaults = objective.config_class()
        assert read_recipe("digits", [f"{key}={value}" for key, value in SETTINGS[name].items()]).objective_config
        with pytest.raises(AttributeError):  # frozen
            setattr(defaults, fields(defaults)[0].name, 0)


@of_every_objective
def test_the_loss_is_finite_and_falls(tmp_path, name) -> None:
    run = shared_run(tmp_path, **(SETTINGS[name] | HEALTHY.get(name, {}) | {"train.lr": 3e-3, "train.epochs": 8}))
    losses = [row["train_loss"] for row in run.metrics]
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.97 * losses[0]
    for metric in load_objective(name).metric_names:
        assert all(math.isfinite(row[metric]) for row in run.metrics)
    assert load_objective(name).selection_metric in run.metrics[-1]


@of_every_objective
def test_a_run_is_resumed_bit_by_bit(tmp_path, name) -> None:
    check_goes_on_after_a_stop(tmp_path, **(SETTINGS[name] | {"train.epochs": 3, "model.drop_path_rate": 0.2}))


@of_every_objective
def test_the_recorded_step_is_the_plain_one(tmp_path, name) -> None:
    settings = {"train.epochs": 2, "model.norm": "rmsnorm", "model.qkv_bias": "false", "train.lr": 1e-4}
    check_recorded_as_plain(tmp_path, **(SETTINGS[name] | settings))


@of_every_objective
def test_metrics_are_means_over_images_whatever_the_size_of_a_part(tmp_path, name) -> None:
    """Rounding grows with the steps and their size."""
    common = SETTINGS[name] | {"train.epochs": 1, "train.lr": 1e-4}
    whole, parts = (shared_run(tmp_path / str(n), **common, **{"train.grad_accum_steps": n}) for n in (1, 4))
    [one], [other] = untimed(whole), untimed(parts)
    for metric in load_objective(name).metric_names:
        if metric not in BATCH_METRICS:
            assert other[metric] == pytest.approx(one[metric], rel=1e-4), metric


@of_every_objective
def test_the_cost_is_what_pytorch_counts(tmp_path, name) -> None:
    """Forward and backward pass of one step, but the gradient of the images, which no layer needs."""
    sizes = {"model.embed_dim": 32, "model.positions": "rotary"}  # no table of positions that DINO would resample
    state, _ = build_state_and_run(tmp_path, **(SETTINGS[name] | sizes))
    for module in (*state.model.modules(), *state.eval_model.modules(), *state.objective.extra_module.modules()):
        if hasattr(module, "kernel"):
            module.kernel = UNFUSED_KERNEL  # the backward pass of a fused kernel computes the attention again
    plan, images = make_epoch_plan(state, epoch=0), state.data.train
    indices = plan.image_order[0]
    batch = state.augment_batch(images.images[indices], images.labels[indices], select_step_draws(plan.draws, 0))
    with FlopCounterMode(display=False) as counter:
        metrics = state.objective.compute_loss_and_metrics(batch, compute_schedule_values(0, 10, state.recipe))
        metrics["train_loss"].backward()
    estimate = count_train_flops_per_image(state.recipe) * len(indices)
    embedding = sum(stage.flops for stage in list_stages(state.recipe.model) if stage.name.startswith("patch_embed"))
    missing = NUM_EMBEDDINGS[name] * embedding * len(indices)
    assert counter.get_total_flops() == pytest.approx(estimate - missing, rel=1e-9)


@without_labels
def test_settings_that_need_labels_or_another_objective_are_refused(name) -> None:
    for word in NEEDS_LABELS:
        check_refused(f"digits-{name}", word, f"needs labels, but train.objective={name} has none")
    check_refused(f"digits-{name}", "model.merge_tokens=1", f"is for inference, not for train.objective={name}")
    check_refused(
        f"digits-{name}", f"{name}.{FIRST[name]}x=1", f"'{name}.{FIRST[name]}x'. Did you mean {name}.{FIRST[name]}?"
    )
    for recipe, used in [("digits", "classify"), *((f"digits-{other}", other) for other in OBJECTIVE_SECTIONS)]:
        if used != name:
            text = f"{name}.… needs train.objective={name}, but train.objective={used} is set."
            check_refused(recipe, f"{name}.{FIRST[name]}={CHANGED.get(name, 0.5)}", text)


@without_labels
def test_augmentation_with_labels_is_refused(name) -> None:
    with pytest.raises(UserError, match=f"mixup mixes labels, but train.objective={name} uses none"):
        complete_augmentation_for_objective(AugmentConfig(mixup=0.5), "digits", 1, name)
    policy = complete_augmentation_for_objective(AugmentConfig(), "cifar10", 3, name)
    assert not policy.mixup and not policy.cutmix and not policy.erase and not policy.shift
