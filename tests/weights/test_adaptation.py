"""Pretrained weights for other sizes: resampling is timm's, nothing is lost silently, the report is true."""

import pytest
import torch
from safetensors.torch import save_file
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models._builder import adapt_input_conv  # as timm's own weights go from colour to grey
from torch.nn import functional as F

from tests.weights.test_pretrained import SHARED, build_small_timm, compute_max_difference, real
from vitascope import ModelConfig, UserError, VisionTransformer, adapt
from vitascope.data.image_ops import to_grayscale
from vitascope.data.preprocessing import Preprocessing
from vitascope.inference.prediction import load_or_convert_input_images
from vitascope.model.positions import resample_position_table
from vitascope.training.initial_weights import format_adaptation_report
from vitascope.weights.adaptation import AdaptedModel
from vitascope.weights.adaptation_report import count_flops_per_image, plan_adaptation_or_explain_refusal
from vitascope.weights.model_info import ModelInfo, WeightsMetadata
from vitascope.weights.pretrained import (
    IMAGENET_CLASSES,
    PretrainedModel,
    build_pretrained_from_state_dict,
    read_pretrained_model,
)
from vitascope.weights.resampling import (
    compute_patch_resampling_error,
    resample_patch_filters,
    sum_or_repeat_filter_channels,
)


def pretrained(**settings) -> PretrainedModel:
    return build_pretrained_from_state_dict(build_small_timm(**settings).state_dict(), "theirs")


@pytest.mark.parametrize(("old", "new"), [((14, 14), (7, 7)), ((14, 14), (8, 8)), ((4, 6), (9, 5)), ((7, 7), (16, 16))])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_positions_are_resampled_as_timm_does(old, new, prefix) -> None:
    table = torch.randn(1, prefix + old[0] * old[1], 24)
    theirs = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    assert compute_max_difference(resample_position_table(table, old, new, prefix), theirs) < 1e-6


@pytest.mark.parametrize("new", [(4, 4), (8, 8), (32, 32), (7, 14), (2, 2)])
def test_patch_filters_are_resampled_as_timm_does(new) -> None:
    filters = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.02  # as large as real ones
    theirs = resample_patch_embed(filters, list(new))
    assert compute_max_difference(resample_patch_filters(filters, new), theirs) < 1e-6 * max(
        1.0, theirs.abs().max().item()
    )


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_channels_change_as_timm_s_do(channels) -> None:
    filters = torch.randn(8, 3, 4, 4)
    assert (
        compute_max_difference(sum_or_repeat_filter_channels(filters, channels), adapt_input_conv(channels, filters))
        < 1e-6
    )


def test_a_larger_patch_answers_an_enlarged_image_as_before() -> None:
    filters, patch = torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.randn(1, 2, 4, 4, dtype=torch.float64)
    larger = F.interpolate(patch, size=(8, 8), mode="bicubic", antialias=True)
    answers = F.conv2d(larger, resample_patch_filters(filters, (8, 8)))
    assert compute_max_difference(answers, F.conv2d(patch, filters)) < 1e-12
    assert compute_patch_resampling_error(filters, resample_patch_filters(filters, (8, 8))) < 1e-12


def test_what_a_smaller_patch_loses_is_what_is_measured() -> None:
    """Against answers to random patches whose neighbouring pixels correlate by 0.95."""
    filters = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    smaller = resample_patch_filters(filters, (4, 4))
    row = 0.95 ** (torch.arange(8)[:, None] - torch.arange(8)).abs().double()
    root = torch.linalg.cholesky(row)
    patches = (
        root @ torch.randn(20000, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ root.T
    )
    before = F.conv2d(patches, filters)
    after = F.conv2d(F.interpolate(patches, size=(4, 4), mode="bicubic", antialias=True), smaller)
    measured = ((after - before).square().mean() / before.square().mean()).sqrt().item()
    assert compute_patch_resampling_error(filters, smaller) == pytest.approx(measured, rel=0.03)
    assert compute_patch_resampling_error(filters, smaller, pixel_correlation=1e-9) > compute_patch_resampling_error(
        filters, smaller
    )


@torch.no_grad()
def as_in_colour(pretrained_model: PretrainedModel, made: AdaptedModel, stored: torch.Tensor) -> float:
    """How far answers to grey images are apart: shown in colour to the one, in grey to the other, each prepared."""
    (old, old_way), (new, new_way) = ((m.build_model(), m.info.preparation) for m in (pretrained_model, made))
    return compute_max_difference(new(new_way(stored)), old(old_way(stored.expand(-1, 3, -1, -1).contiguous())))


def test_grey_images_get_the_answer_they_had_in_colour() -> None:
    pretrained_model, stored = pretrained(), torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    made = adapt(pretrained_model, in_chans=1)
    assert as_in_colour(pretrained_model, made, stored) < 1e-5
    assert made.info.preparation.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,))
    assert [change.name for change in made.report.resampled] == ["patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert made.report.kept == len(made.weights) - 2


def test_grey_and_another_patch_together_are_the_two_one_after_the_other() -> None:
    pretrained_model, stored = pretrained(), torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    sizes = {"img_size": 28, "patch_size": 4}
    assert as_in_colour(adapt(pretrained_model, **sizes), adapt(pretrained_model, in_chans=1, **sizes), stored) < 1e-5


def test_colours_that_are_normalised_alike_leave_the_bias() -> None:
    pretrained_model = build_pretrained_from_state_dict(
        build_small_timm().state_dict(), "theirs", WeightsMetadata(mean=(0.5,) * 3, std=(0.5,) * 3)
    )
    made, stored = adapt(pretrained_model, in_chans=1), torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    assert as_in_colour(pretrained_model, made, stored) < 1e-5
    assert made.weights["patch_embed.proj.bias"] is pretrained_model.weights["patch_embed.proj.bias"]


@real
def test_real_weights_answer_grey_photos_as_in_colour() -> None:
    pretrained_model = read_pretrained_model(str(SHARED / "weights" / "deit_tiny_patch16_224.safetensors"))
    photos = SHARED / "photos" / "imagenet"
    files = [photos / line.split(",")[0] for line in (photos / "labels.csv").read_text().splitlines()[1:7]]
    stored = load_or_convert_input_images(files, pretrained_model.info.stored).images
    stored = (to_grayscale(stored.float() / 255) * 255).round().byte()
    assert len(stored) == 6 and as_in_colour(pretrained_model, adapt(pretrained_model, in_chans=1), stored) < 1e-4


@pytest.mark.parametrize("channels", [2, 3, 4, 5, 6])
@torch.no_grad()
def test_what_other_channels_lose_is_what_is_measured(channels) -> None:
    """On images whose channels are the old ones in turn; noise, for which answers' power is the filters' norm."""
    pretrained_model = pretrained()
    made = adapt(pretrained_model, in_chans=channels)
    patches = torch.randn(20000, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    shown = patches[:, [channel % 3 for channel in range(channels)]]
    before, after = (
        F.conv2d(images, m.weights["patch_embed.proj.weight"])
        for images, m in ((patches, pretrained_model), (shown, made))
    )
    measured = ((after - before).square().mean() / before.square().mean()).sqrt().item()
    lost = [change.lost for change in made.report.resampled] or [0.0]
    assert lost == pytest.approx([measured], rel=0.03, abs=1e-6) and (measured < 1e-6) == (channels % 3 == 0)


@torch.no_grad()
def test_images_enlarged_with_the_patch_get_the_answer_they_had() -> None:
    pretrained_model = pretrained()
    images = torch.randn(2, 3, 32, 32)
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8)  # each patch enlarged for itself, as the theory has it
    large = F.interpolate(patches.reshape(-1, 1, 8, 8), size=(16, 16), mode="bicubic", antialias=True)
    large = large.view(2, 3, 4, 4, 16, 16).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 64, 64)
    assert (
        compute_max_difference(
            adapt(pretrained_model, img_size=64, patch_size=16).build_model()(large),
            pretrained_model.build_model()(images),
        )
        < 1e-4
    )


def test_the_report_says_what_happened() -> None:
    pretrained_model = pretrained(img_size=64, reg_tokens=2)
    made = adapt(pretrained_model, img_size=28, patch_size=4, in_chans=1, num_classes=10)
    report = made.report
    assert (report.grid_before, report.grid_after) == ([8, 8], [7, 7])
    assert (report.tokens_before, report.tokens_after, report.pixels_seen) == (67, 52, 1.0)
    assert [(change.name, change.after) for change in report.resampled] == [
        ("patch_embed.proj.weight", [128, 3, 4, 4]),
        ("patch_embed.proj.weight", [128, 1, 4, 4]),
        ("patch_embed.proj.bias", [128]),
        ("pos_embed", [1, 52, 128]),
    ]
    assert all(0 < change.lost < 1 for change in report.resampled if change.name != "patch_embed.proj.bias")
    assert report.new == report.dropped == ["head.weight", "head.bias"]
    assert report.notes == ["head replaced: the weights have 7 classes, not 10"]
    untouched = [name for name, weight in made.weights.items() if weight is pretrained_model.weights.get(name)]
    assert report.kept == len(untouched) == len(made.weights) - 5
    assert report.flops_after == count_flops_per_image(made.info.model) and report.alternative["tokens"] == 67
    assert torch.equal(made.weights["pos_embed"][:, :3], pretrained_model.weights["pos_embed"][:, :3])


def test_positions_without_tokens_in_front_are_all_resampled() -> None:
    pretrained_model = pretrained(reg_tokens=2, no_embed_class=True)
    made = adapt(pretrained_model, img_size=64)
    wanted = resample_position_table(pretrained_model.weights["pos_embed"], (4, 4), (8, 8), 0)
    assert torch.equal(made.weights["pos_embed"], wanted) and made.weights["pos_embed"].shape == (1, 64, 128)


def test_the_same_sizes_change_nothing() -> None:
    pretrained_model = pretrained()
    made = adapt(pretrained_model, img_size=32, patch_size=8)
    assert not made.report.resampled and not made.report.new and not made.report.alternative
    assert all(made.weights[name] is weight for name, weight in pretrained_model.weights.items())


@pytest.mark.parametrize(
    ("asked", "seen", "grid", "sentence"),
    [
        (
            {"img_size": 28, "patch_size": 16},
            256 / 784,
            [1, 1],
            "only one patch \\(32.7 % of the pixels\\), so there is no attention between patches",
        ),
        ({"img_size": 8}, 1.0, [1, 1], "one patch"),
        ({"img_size": 28}, 576 / 784, [3, 3], "26.5 % of the pixels would be ignored"),
        ({"img_size": 4}, 0.0, [0, 0], "smaller than one patch"),
    ],
)
def test_a_grid_that_sees_too_little_is_refused_with_what_works(asked, seen, grid, sentence) -> None:
    pretrained_model = pretrained()
    report = plan_adaptation_or_explain_refusal(pretrained_model, **asked)
    assert report.pixels_seen == pytest.approx(seen) and report.grid_after == grid
    with pytest.raises(UserError, match=sentence) as raised:
        adapt(pretrained_model, **asked)
    assert str(raised.value).endswith("img_size=32 with patch_size=8 (upscales the images).")
    for word in str(raised.value).split("patch_size=")[2:-1]:
        adapt(pretrained_model, **(asked | {"patch_size": int(word.split()[0])}))  # what it offers does work


def test_a_rejected_size_is_not_offered_again() -> None:
    report = plan_adaptation_or_explain_refusal(pretrained(), img_size=32, patch_size=5)
    assert "With img_size=32 and patch_size=5, " in report.refused
    assert report.refused.endswith(
        "patch_size=2 (grid 16×16), patch_size=4 (grid 8×8), patch_size=8 (grid 4×4), or patch_size=16 (grid 2×2)."
    )


def test_training_says_that_sizes_change() -> None:
    text = format_adaptation_report(adapt(pretrained(), img_size=28, patch_size=4).report)
    assert "image size 32×32 → 28×28 pixels, patch size 8×8 → 4×4 pixels, as set for this run." in text
    assert "To keep the weights' own sizes, add model.img_size=32 model.patch_size=8." in text
    assert "To see how much information this loses: vitascope adapt " in text and "relative error" not in text
    same_patch = format_adaptation_report(adapt(pretrained(), img_size=40).report)
    assert "image size 32×32 → 40×40 pixels, patch size unchanged (8×8 pixels)" in same_patch
    assert "To keep the weights' own size, add model.img_size=32." in same_patch
    assert "pos_embed: resampled for the grid of patches 4×4 → 7×7" in text
    new_head = format_adaptation_report(adapt(pretrained(), num_classes=3).report)
    assert "image size" not in new_head
    assert "note: head replaced" in new_head and "dropped: " not in new_head and "new: " not in new_head


def test_training_warns_of_more_tokens_than_the_weights_have() -> None:
    """By hand: the class token and 4×4 patches, then 8×8; each token costs the same except in attention."""
    finer = adapt(pretrained(), img_size=32, patch_size=4).report
    ratio = finer.flops_after / finer.flops_before
    sentence = (
        f"warning: 65 tokens per image (8×8 patches) instead of the weights' 17 (4×4): {ratio:.2g} times the FLOPs."
    )
    assert ratio > 65 / 17 / 2 and sentence in format_adaptation_report(finer)
    coarser = format_adaptation_report(adapt(pretrained(), img_size=16).report)
    assert "5 tokens per image (2×2 patches) instead of the weights' 17 (4×4): 0." in coarser
    assert "warning" not in coarser
    same_grid = format_adaptation_report(adapt(pretrained(), img_size=16, patch_size=4).report)
    assert "patch size" in same_grid and "tokens per image" not in same_grid


def test_class_names_are_not_assumed_for_a_new_classifier() -> None:
    pretrained_model = build_pretrained_from_state_dict(build_small_timm(num_classes=1000).state_dict(), "theirs")
    assert IMAGENET_CLASSES in adapt(pretrained_model, img_size=64).report.assumed
    assert IMAGENET_CLASSES not in adapt(pretrained_model, num_classes=10).report.assumed


@pytest.mark.parametrize(
    "asked",
    [
        {"patch_size": 0},
        {"img_size": 0},
        {"patch_size": (4, 0)},
        {"img_size": (1, 2, 3)},
        {"img_size": (32,)},
        {"img_size": ("a", "b")},
    ],
    ids=str,
)
def test_a_size_that_is_none_gets_a_sentence(asked) -> None:
    with pytest.raises(UserError, match=r"is not a size|is too small"):
        plan_adaptation_or_explain_refusal(pretrained(), **asked)


@torch.no_grad()
def test_rotary_and_fixed_positions_are_made_anew_for_the_new_grid() -> None:
    config = ModelConfig(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=3, positions="sincos2d+rotary"
    )
    model = VisionTransformer(config).eval()
    facts = ModelInfo(config, list("abc"), Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3), (3, 32, 32))
    pretrained_model = PretrainedModel("ours", "vitascope", facts, model.state_dict())
    made = adapt(pretrained_model, img_size=48)
    assert not made.report.resampled and made.build_model()(torch.randn(1, 3, 48, 48)).shape == (1, 3)
    assert made.info.classes == list("abc")


def test_a_new_classifier_comes_from_the_seed() -> None:
    pretrained_model = pretrained()
    first, again, other = (
        adapt(pretrained_model, num_classes=5, seed=seed).weights["head.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_settings_that_the_weights_decide_cannot_be_asked_for(tmp_path) -> None:
    save_file(build_small_timm().state_dict(), tmp_path / "w.safetensors")
    assert (
        adapt(tmp_path / "w.safetensors", patch_size=4, drop_path_rate=0.1).info.model.drop_path_rate == 0.1
    )  # a Path
    for settings, sentence in [({"depth": 3}, "cannot change depth"), ({"imgsize": 28}, "Did you mean img_size")]:
        with pytest.raises(UserError, match=sentence):
            adapt(tmp_path / "w.safetensors", **settings)
