"""What recipes use to get there sooner: less of each image at first, whitened patches, mirror images by turns."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.training.test_runs import build_state_and_run, check_goes_on_after_a_stop
from tests.training.tiny import tiny_run
from vitascope import UserError
from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.data.sampling import draw_alternating_flips
from vitascope.model.config import ModelConfig
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.pretraining import PatchDropout
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.choices import complete_augmentation_for_objective
from vitascope.recipe.reading import read_recipe
from vitascope.run.metrics import list_epoch_seconds_without_setup
from vitascope.training.engines.prepare_batched import check_batchable
from vitascope.training.engines.single_run import EagerEngine
from vitascope.training.hardware import count_equivalent_forward_passes, count_train_flops_per_image
from vitascope.training.initial_weights import VARIANCE_OFFSET, compute_whitening_mean_and_matrix
from vitascope.training.loader import make_epoch_plan
from vitascope.training.rate_finder import _train_at_rising_lr_yielding_losses
from vitascope.training.step import MetricSums


def patches_seen(state, epochs: int) -> list[int]:
    """By the first block, in the first step of each epoch."""
    engine, seen = EagerEngine(state, MetricSums.empty(state)), []
    state.model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    for epoch in range(epochs):
        engine.start_epoch(epoch)
        engine.run_next_step()
    engine.close()
    return [count - state.recipe.model.num_prefix_tokens for count in seen]


def test_some_patches_are_used_in_the_first_epochs_only(tmp_path) -> None:
    settings = {"train.epochs": 5, "train.patch_share_until": 0.4, "train.patch_share": 0.5}
    state, _ = build_state_and_run(tmp_path, **settings)
    assert patches_seen(state, 5) == [8, 8, 16, 16, 16]


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_an_answer_from_some_patches_does_not_depend_on_the_others(pool) -> None:
    config = ModelConfig(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, class_token=pool == "token", global_pool=pool,
        positions="learned+rotary",
    )  # fmt: skip
    model = VisionTransformer(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    images, noise = torch.rand(2, 3, 16, 16), torch.rand(2, 16)
    kept = noise.argsort(dim=1) < 0
    kept.scatter_(1, noise.argsort(dim=1)[:, :12], True)
    others = unpatchify(torch.where(kept[..., None], patchify(images, 4), torch.rand(2, 16, 48)), 4, (4, 4))
    answer = PatchDropout(model, 12)(images, noise)
    torch.testing.assert_close(PatchDropout(model, 12)(others, noise), answer)
    assert not torch.allclose(model(others), model(images), atol=1e-3)
    torch.testing.assert_close(PatchDropout(model, 16)(images, noise), model(images), rtol=1e-4, atol=1e-5)


def test_fewer_patches_cost_less() -> None:
    assert count_equivalent_forward_passes(read_recipe("cifar10", [])) == 1
    half = read_recipe("cifar10", ["train.patch_share=0.5", "train.patch_share_until=0.4"])
    assert count_equivalent_forward_passes(half) == pytest.approx(
        0.796, abs=1e-3
    )  # half of the tokens, a quarter of their meetings


def test_tokens_merged_or_dropped_in_answers_are_learnt_with_all_the_same() -> None:
    plain, half = read_recipe("cifar10", []), ["train.patch_share=0.5", "train.epochs=4"]
    for fewer in ("model.merge_tokens=6", "model.drop_tokens=6"):
        recipe = read_recipe("cifar10", [fewer])
        assert count_train_flops_per_image(recipe) == count_train_flops_per_image(plain)
        assert count_equivalent_forward_passes(
            read_recipe("cifar10", [*half, fewer])
        ) == count_equivalent_forward_passes(read_recipe("cifar10", half))
        with pytest.raises(UserError, match="Set it at inference instead"):
            check_batchable([read_recipe("cifar10", [fewer, "model.drop_path_rate=0"])])


STEP = 0.01


class Clock:
    """Seconds that pass only where they are meant to."""

    def __init__(self) -> None:
        self.now = 0.0

    def slow_down(self, function, seconds: float):
        def slow(*args):
            self.now += seconds
            return function(*args)

        return slow


def test_making_weights_whitening_and_saving_are_inside_the_clock_and_setting_up_in_the_cold_one(
    tmp_path, monkeypatch
) -> None:
    from vitascope.training import loop, prepare
    from vitascope.training.engines import single_run

    clock = Clock()
    slow = {
        (prepare, "VisionTransformer"): 0.5,
        (prepare, "fold_whitening_into_patch_embedding"): 1.0,
        (prepare, "choose_hardware_and_set_threads"): 2.0,
        (loop, "save_checkpoint_and_best_weights"): 0.4,
        (single_run, "train_step"): STEP,
    }
    for (module, name), seconds in slow.items():
        monkeypatch.setattr(module, name, clock.slow_down(getattr(module, name), seconds))
    for module in (prepare, loop):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    rows = tiny_run(tmp_path, **{"train.whiten": True, "train.epochs": 3}).metrics
    steps = STEP * 12
    assert rows[0]["prepared_seconds"] == pytest.approx(1.5) and "prepared_seconds" not in rows[1]
    assert rows[0]["seconds"] == pytest.approx(2.0 + 1.5 + steps), "cold"
    assert [row["seconds"] for row in rows[1:]] == pytest.approx([0.4 + steps] * 2), "the first and the second save"
    assert list_epoch_seconds_without_setup(rows)[0] == pytest.approx(1.5 + 0.4 + steps)
    assert list_epoch_seconds_without_setup([{"seconds": 31.0, "prepared_seconds": 1.0}, *[{"seconds": 2.0}] * 3]) == [
        3.0,
        2.0,
        2.0,
        2.0,
    ]


def test_a_run_stopped_while_it_uses_some_patches_is_resumed_exactly(tmp_path) -> None:
    check_goes_on_after_a_stop(tmp_path, **{"train.epochs": 4, "train.patch_share": 0.5, "train.whiten": True})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.whiten=true", "model.tokenizer=conv"], "train.whiten initializes the patch projection"),
        (["data.augment.flip_mode=alternate"], "flip_mode='alternate' is unknown. Did you mean alternating"),
        (
            ["data.augment.flip_mode=alternating", "data.balance=sampling"],
            "data.balance=sampling, which draws images at random. Set data.augment.flip_mode=random.",
        ),
        (["train.final_lr=0.1", "train.schedule=constant"], "has no effect with train.schedule=constant"),
        (
            ["train.patch_share=0.5", "train.patience=3"],
            "train.patience does not work with train.patch_share",
        ),
        (["train.patch_share=0.5", "train.patch_share_until=1.5"], "train.patch_share_until=1.5"),
        (
            ["model.initialize=mimetic", "model.output_projection=false"],
            "initialize=mimetic sets the output",
        ),
        (["train.patch_share=0"], "train.patch_share=0.0 must be greater than 0"),
        (["train.patch_share=1.5"], "must be greater than 0 and at most 1"),
        (["train.patch_share=0.5", "model.causal=true"], "but model.causal=true needs all of them"),
        (
            ["train.patch_share=0.02", "model.attention=lsa"],
            "one token, but model.attention=lsa needs at least two",
        ),
        (["train.patch_share=0.995"], "keeps all 64 patches"),
        (["train.patch_share=0.5", "train.patch_share_until=0"], "has no effect with train.patch_share_until=0"),
        (["train.whiten=2"], "train.whiten must be true or false, not 2."),
        (["train.whiten="], "train.whiten must be true or false, not empty."),
        (["data.augment.randaugment=15"], "randaugment=15 must be at least 0 and at most 14."),
        (["data.passes_per_epoch=1.5"], "data.passes_per_epoch: 1.5 is not a whole number."),
        (["data.shift=2"], "Did you mean data.augment.shift?"),
        (["train.depth.x=true"], "train.depth"),
    ],
)
def test_what_does_not_fit_is_refused(words, message) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        read_recipe("cifar10", words)


def test_turns_are_refused_where_they_would_be_ignored() -> None:
    with pytest.raises(UserError, match="but DINO draws a new crop each time"):
        complete_augmentation_for_objective(AugmentConfig(flip_mode="alternating"), "cifar10", 3, "dino")
    with pytest.raises(UserError, match=r"but data\.augment\.flip=0\.2 is not 0\.5"):
        resolve_augmentation(AugmentConfig(flip_mode="alternating", flip=0.2), "cifar10")
    assert (
        complete_augmentation_for_objective(AugmentConfig(flip_mode="alternating"), "cifar10", 3, "mae").flip_mode
        == "alternating"
    )


def test_one_epoch_at_least_is_small_and_the_last_is_whole() -> None:
    for epochs, share, small in ((10, 0.5, 5), (10, 0.01, 1), (10, 1.0, 9), (2, 0.9, 1), (1, 0.5, 0)):
        train = replace(read_recipe("cifar10", ["train.patch_share=0.5"]).train, epochs=epochs, patch_share_until=share)
        assert train.num_patch_dropout_epochs == small


def test_a_single_epoch_uses_all_patches(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **{"train.epochs": 1, "train.patch_share": 0.5})
    assert patches_seen(state, 1) == [16] and count_equivalent_forward_passes(state.recipe) == 1


def test_the_rate_is_sought_on_whole_images(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **{"train.epochs": 4, "train.patch_share": 0.5})
    seen = set()
    state.model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape[1]))
    next(_train_at_rising_lr_yielding_losses(state))
    assert seen == {state.recipe.model.num_tokens}


def test_a_patch_share_is_refused_without_labels_and_in_batched_runs() -> None:
    with pytest.raises(UserError, match=r"patch_share=0\.5 needs labels"):
        read_recipe("cifar10-mae", ["train.patch_share=0.5"])
    with pytest.raises(UserError, match=r"Batched runs do not support train\.patch_share=0\.5"):
        check_batchable([read_recipe("cifar10", ["train.patch_share=0.5", "model.drop_path_rate=0"])])


def test_whitened_patches_vary_by_one_in_every_direction() -> None:
    torch.manual_seed(0)
    spread = torch.tensor([30.0, 10.0, 3.0, 1.0], dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    patches = (torch.randn(500, 8, 4, dtype=torch.float64) * spread) @ turned + torch.tensor([1.0, -2.0, 0.5, 7.0])
    mean, matrix = compute_whitening_mean_and_matrix(patches)
    white = (patches.flatten(0, 1) - mean) @ matrix
    torch.testing.assert_close(white.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(4, dtype=torch.float64), atol=2 * VARIANCE_OFFSET, rtol=0)
    torch.testing.assert_close(matrix, matrix.T)


def test_the_projection_starts_on_whitened_patches(tmp_path) -> None:
    plain, _ = build_state_and_run(tmp_path / "a", **{"train.seed": 3})
    white, _ = build_state_and_run(tmp_path / "b", **{"train.seed": 3, "train.whiten": True})
    images = plain.data.preprocessing(plain.data.train.images)
    patches = patchify(images, plain.recipe.model.patch_size)
    mean, matrix = compute_whitening_mean_and_matrix(patches)
    wanted = (patches.double() - mean) @ matrix @ plain.model.patch_embed.proj.weight.flatten(1).double().T
    whitened = white.model.patch_embed(images) - plain.model.patch_embed.proj.bias
    torch.testing.assert_close(whitened.double(), wanted, atol=1e-5, rtol=1e-4)
    assert torch.equal(white.model.blocks[0].attn.qkv.weight, plain.model.blocks[0].attn.qkv.weight)


def test_two_epochs_by_turns_show_every_image_from_both_sides() -> None:
    order = torch.randperm(1000).view(10, 100)
    again = torch.randperm(1000).view(5, 200)
    first, second = torch.zeros(1000, dtype=torch.bool), torch.zeros(1000, dtype=torch.bool)
    first[order.flatten()] = draw_alternating_flips(order, 1000, 0.5, 7, 4).flatten()
    second[again.flatten()] = draw_alternating_flips(again, 1000, 0.5, 7, 5).flatten()
    assert torch.equal(first, ~second)
    assert 440 < first.sum() < 560
    assert not torch.equal(
        draw_alternating_flips(order, 1000, 0.5, 7, 4), draw_alternating_flips(order, 1000, 0.5, 8, 4)
    )


def test_the_setting_reaches_the_draws(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path)
    augment = replace(state.recipe.data.augment, flip=0.5, flip_mode="alternating")
    state.recipe = replace(state.recipe, data=replace(state.recipe.data, augment=augment))
    state.objective.state.recipe = state.recipe
    plans = [make_epoch_plan(state, epoch) for epoch in (0, 1)]
    sides: dict[int, list[bool]] = {}
    for order, draws in plans:
        for image, mirrored in zip(order.flatten().tolist(), draws["flip"].flatten().tolist(), strict=True):
            sides.setdefault(image, []).append(mirrored)
    both = [seen for seen in sides.values() if len(seen) == 2]
    assert len(both) > 500 and all(seen[0] != seen[1] for seen in both)


def test_an_epoch_may_go_over_the_images_several_times(tmp_path) -> None:
    """As many steps, images and draws in a third of the epochs; the law of steps is the same."""
    state, _ = build_state_and_run(tmp_path, **{"data.passes_per_epoch": 3, "train.epochs": 2})
    once, _ = build_state_and_run(tmp_path, **{"train.epochs": 6})
    assert abs(state.total_steps - once.total_steps) <= 6  # the smaller batch at an epoch's end is left out less often
    order, draws = make_epoch_plan(state, 0)
    assert order.shape[0] == state.steps_per_epoch and all(len(draw) == len(order) for draw in draws.values())
    seen = order.flatten().bincount(minlength=len(state.data.train))
    assert seen.max() == 3 and seen.min() >= 2
    with pytest.raises(UserError, match=r"data\.passes_per_epoch=0 must be at least 1"):
        read_recipe("digits", ["data.passes_per_epoch=0"])


def test_flips_take_turns_within_an_epoch_too() -> None:
    order = torch.cat([torch.randperm(50), torch.randperm(50)]).view(10, 10)
    mirrored = draw_alternating_flips(order, 50, 0.5, 1, 4)
    sides = {image: mirrored.flatten()[order.flatten() == image].tolist() for image in range(50)}
    assert all(sorted(seen) == [False, True] for seen in sides.values())
