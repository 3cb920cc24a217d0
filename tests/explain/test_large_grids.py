"""Grids of more than 64 patches: sampled curves, occlusion by choice, forward passes counted in advance."""

import json

import pytest
import torch
from PIL import Image

from vitascope import ModelConfig, VisionTransformer
from vitascope.data.preprocessing import Preprocessing
from vitascope.explain import faithfulness
from vitascope.explain.faithfulness import (
    choose_numbers_of_changed_patches,
    count_forward_passes,
    deletion,
    describe_curve_sampling,
    insertion,
)
from vitascope.explain.maps import get_token_layout
from vitascope.explain.methods import METHODS, list_default_methods
from vitascope.run.checkpoint import save_model_folder
from vitascope.weights.model_info import ModelInfo

LARGE = ModelConfig(img_size=18, patch_size=2, in_chans=1, embed_dim=16, depth=1, num_heads=2, num_classes=3)  # 9×9


@pytest.fixture
def model() -> VisionTransformer:
    model = VisionTransformer(LARGE).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return model


def test_up_to_64_patches_are_changed_one_by_one_and_more_in_28_steps() -> None:
    assert choose_numbers_of_changed_patches(64).tolist() == list(range(65))
    assert choose_numbers_of_changed_patches(196).tolist() == list(range(0, 197, 7))
    for num_patches in (65, 81, 1024):
        numbers = choose_numbers_of_changed_patches(num_patches)
        assert len(numbers) == 29 and (numbers[0], numbers[-1]) == (0, num_patches)
        assert (numbers.diff() - num_patches / 28).abs().max() < 1
    assert describe_curve_sampling(64) == ""
    assert describe_curve_sampling(81) == "Each curve has 29 points, evenly spaced from 0 to 81 changed patches."


@pytest.mark.parametrize("curve", [deletion, insertion])
def test_a_sampled_curve_has_the_values_of_the_full_curve(curve, model, monkeypatch) -> None:
    images, heatmap, targets = torch.randn(2, 1, 18, 18), torch.rand(2, 9, 9), torch.tensor([0, 2])
    sampled = curve(model, images, heatmap, targets, get_token_layout(model))
    monkeypatch.setattr(faithfulness, "MAX_PATCHES_WITH_ALL_POINTS", 81)
    full = curve(model, images, heatmap, targets, get_token_layout(model))
    monkeypatch.undo()
    numbers = choose_numbers_of_changed_patches(81)
    if curve is insertion:  # computed backwards
        numbers = (81 - numbers).flip(0)
    assert full.shape == (2, 82) and full.std() > 0.01
    torch.testing.assert_close(sampled, full[:, numbers], atol=1e-6, rtol=0)


def test_occlusion_is_computed_by_default_only_on_small_grids() -> None:
    assert list_default_methods(64) == list(METHODS)
    assert list_default_methods(65) == [name for name in METHODS if name != "occlusion"]
    curves = 2 * 29
    assert count_forward_passes([], 196, 2) == 2 * (2 + curves)
    assert count_forward_passes(["occlusion"], 196, 2) == 2 * (2 + 2 * curves + 197)
    assert count_forward_passes(list_default_methods(196), 196, 2) == 880  # two photos at 224 px
    assert count_forward_passes(["attention", "integrated-gradients"], 49, 1) == 2 + 3 * 100 + 32


def test_a_large_grid_is_explained_with_the_expected_passes_and_a_progress_bar(
    model, vitascope, tmp_path, monkeypatch
) -> None:
    info = ModelInfo(LARGE, ["a", "b", "c"], Preprocessing((18, 18), (0.5,), (0.5,)), (1, 18, 18))
    save_model_folder(tmp_path / "model", info, model.state_dict())
    pixels = torch.randint(256, (18, 18), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "photo.png")
    passes, forward = [], VisionTransformer.forward

    def count_images(self, images):
        passes.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(VisionTransformer, "forward", count_images)
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes stderr for a terminal
    answer = vitascope("explain", str(tmp_path / "model"), str(tmp_path / "photo.png"), "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.err
    assert sum(passes) == count_forward_passes(list_default_methods(81), 81, 1) == 2 + 7 * 58 + 32
    assert "Explaining 1 image" in answer.err and "100%" in answer.err
    left_out = "Left out because it is slow with 81 patches: occlusion (140 forward passes, about "
    assert left_out in answer.out and "To add it: --methods all\n" in answer.out
    assert "29 points, evenly spaced from 0 to 81 changed patches" in answer.out
    explained = json.loads((tmp_path / "out" / "explanations.json").read_text())["images"][0]
    assert list(explained["heat"]) == list_default_methods(81)
