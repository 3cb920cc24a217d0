"""SimMIM: the loss by a second computation, what is masked and what the encoder sees, learning, refusals."""

import pytest
import torch
from torch import nn

from tests.training.test_runs import build_state_and_run, check_refused
from tests.training.tiny import shared_run
from vitascope import ModelConfig, VisionTransformer
from vitascope.model.patches import patchify
from vitascope.recipe.reading import read_recipe
from vitascope.training.objectives.simmim import (
    MaskedPixelModel,
    PixelPredictor,
    SimMimConfig,
    expand_block_mask,
    simmim_loss,
)

SIMMIM = {"train.objective": "simmim", "simmim.block_size": 1}
POOLS = {"class token": {}, "mean": {"class_token": False, "global_pool": "avg"}, "registers": {"reg_tokens": 2}}


def small(**settings) -> VisionTransformer:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "in_chans": 3}
    return VisionTransformer(ModelConfig(**(sizes | settings))).eval()


def show_pixels(mask: torch.Tensor) -> torch.Tensor:
    """(batch, 16 patches) -> (batch, 1, 16, 16)."""
    return mask.view(-1, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("positions", ["learned", "sincos2d", "rotary"])
def test_loss_and_prediction_are_those_of_a_second_computation_in_pixels(pool, positions) -> None:
    """As the authors compute it: tokens replaced one by one, an L1 loss of images, divided by masked pixels."""
    model = small(positions=positions, **pool)
    predictor = PixelPredictor(model)
    images, mask = torch.randn(2, 3, 16, 16), torch.rand(2, 16) < 0.6
    tokens = model.patch_embed(images).clone()
    for image, patch in mask.nonzero().tolist():
        tokens[image, patch] = predictor.mask_token[0, 0]
    prefix = [part for part in (model.cls_token, model.reg_token) if part is not None]
    tokens = torch.cat([*(part.expand(2, -1, -1) for part in prefix), tokens], dim=1)
    tokens = tokens if model.pos_embed is None else tokens + model.pos_embed
    for block in model.blocks:
        tokens = block(tokens, None, model.rotation)
    tokens = predictor.norm(model.norm(tokens))[:, model.config.num_prefix_tokens :]
    painted = nn.functional.fold(predictor.pred(tokens).mT, (16, 16), kernel_size=4, stride=4)
    shown = show_pixels(mask).expand_as(images)
    expected = (painted - images).abs()[shown].sum() / shown.sum()
    predicted = MaskedPixelModel(model, predictor)(images, mask)
    assert simmim_loss(predicted, patchify(images, 4), mask).item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_masked_pixels_count() -> None:
    """By hand: patch 0 is visible, patches 1 and 2 are wrong by 1 and by 3 everywhere: (1 + 3) / 2."""
    target, predicted, mask = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), torch.tensor([[False, True, True]])
    predicted[0, 0], predicted[0, 1], predicted[0, 2] = 100.0, 1.0, -3.0
    assert simmim_loss(predicted, target, mask).item() == pytest.approx(2.0)
    predicted.requires_grad_()
    simmim_loss(predicted, target, mask).backward()
    assert (predicted.grad[0, 0] == 0).all() and (predicted.grad[0, 1:] != 0).all()


def test_the_encoder_does_not_see_masked_pixels_and_the_mask_token_learns() -> None:
    model, images, mask = small(), torch.randn(2, 3, 16, 16), torch.rand(2, 16) < 0.6
    network = MaskedPixelModel(model, PixelPredictor(model))
    changed = torch.where(show_pixels(mask), torch.randn_like(images), images)
    torch.testing.assert_close(network(changed, mask), network(images, mask))
    other = torch.where(show_pixels(mask), images, torch.randn_like(images))
    assert not torch.allclose(network(other, mask), network(images, mask))
    simmim_loss(network(images, mask), patchify(images, 4), mask).backward()
    assert network.predictor.mask_token.grad.abs().sum() > 0
    network.zero_grad()
    network(images, torch.zeros_like(mask)).sum().backward()
    assert (network.predictor.mask_token.grad == 0).all()


def test_blocks_are_masked_as_a_whole_and_equally_often(tmp_path) -> None:
    blocks = torch.tensor([[True, False, False, True]])
    wanted = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert expand_block_mask(blocks, (2, 2), 2).view(4, 4).int().tolist() == wanted
    state, _ = build_state_and_run(tmp_path, **SIMMIM)
    noise = state.objective.draw_random_numbers_of_epoch(40, 100, epoch=0)["noise"].flatten(0, 1)
    mask = state.objective.make_patch_mask(noise)
    assert (mask.sum(1) == 10).all()  # 0.6 of 16, rounded
    assert (mask.float().mean(0) - 10 / 16).abs().max() < 0.04  # of 4,000 images: ± 0.0077
    state, _ = build_state_and_run(tmp_path, **(SIMMIM | {"simmim.block_size": 2}))
    noise = state.objective.draw_random_numbers_of_epoch(2, 10, epoch=0)["noise"]
    assert noise.shape == (2, 10, 4) and state.objective.make_patch_mask(noise[0]).shape == (10, 16)


def test_it_learns_to_predict_digits_and_leaves_pictures(tmp_path) -> None:
    """Better than the mean gray value: pixels have mean 0 and deviation 1, and their mean distance from 0 is 0.86."""
    run = shared_run(tmp_path, **SIMMIM, **{"train.epochs": 12, "train.lr": 4e-3, "model.positions": "sincos2d"})
    losses = [row["train_loss"] for row in run.metrics]
    assert losses[-1] < 0.62 < 0.75 < losses[0]
    assert len(list(run.get_path("reconstructions").iterdir())) == 12 and run.get_path("reconstructions.png").is_file()
    assert not any("mask_token" in name for name in run.get_path("config.json").read_text().split())


REFUSED = {
    "model.tokenizer=spt": "train.objective=simmim masks patches, but with model.tokenizer=spt tokens overlap",
    "model.causal=true": "causal=true needs all patches in order",
    "simmim.mask_ratio=1": "greater than 0 and below 1",
    "simmim.block_size=3": "simmim.block_size=3 must divide the grid of 4×4 patches into at least two blocks. "
    "Choose 1 or 2.",
    "simmim.block_size=4": "Choose 1 or 2",
    "simmim.pictures=-1": "is negative",
    "model.patch_size=8": "needs at least two patches, but the model has one",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(word) -> None:
    check_refused("digits-simmim", word, REFUSED[word])


def test_the_default_is_the_papers_ratio_and_the_cifar_blocks_are_a_sixth_of_the_image_or_more() -> None:
    assert SimMimConfig().mask_ratio == 0.6
    recipe = read_recipe("cifar10-simmim")
    assert recipe.objective_config.block_size * recipe.model.patch_shape[0] == 8
