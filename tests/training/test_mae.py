"""MAE: what the encoder may see, what the loss counts, the reference implementation, whole runs."""

import pytest
import torch

from tests.training.test_captured import check_recorded_as_plain
from tests.training.test_runs import check_goes_on_after_a_stop, check_refused
from tests.training.tiny import tiny_run
from vitascope import ModelConfig, VisionTransformer
from vitascope.data.config import AugmentConfig
from vitascope.data.sampling import draw_epoch_patch_noise
from vitascope.model.patches import patchify
from vitascope.model.pretraining import (
    MaeDecoder,
    count_visible_patches,
    encode_visible_patches,
    select_visible_and_restore_indices,
)
from vitascope.recipe.choices import complete_augmentation_for_objective
from vitascope.recipe.reading import read_recipe
from vitascope.training.hardware import count_train_flops_per_image
from vitascope.training.objectives.mae import MaeConfig, MaskedAutoencoder, mae_loss, make_target_pixels

MAE = {"train.objective": "mae", "mae.decoder_dim": 16, "mae.decoder_depth": 1, "mae.decoder_heads": 2}


def small(**settings) -> VisionTransformer:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "in_chans": 3}
    return VisionTransformer(ModelConfig(**(sizes | settings))).eval()


POOLS = {"class token": {}, "mean": {"class_token": False, "global_pool": "avg"}, "registers": {"reg_tokens": 2}}


def test_patches_are_normalised_by_their_unbiased_deviation() -> None:
    """By hand: 1, 2, 3, 4 have mean 2.5 and deviation 1.29099; a biased one would give ±1.34164."""
    pixels = make_target_pixels(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), normalise=True)
    torch.testing.assert_close(pixels, torch.tensor([[[-1.16189, -0.38730, 0.38730, 1.16189]]]), atol=1e-4, rtol=0)
    flat = make_target_pixels(torch.full((1, 1, 4), 0.7), normalise=True)
    assert (flat == 0).all()
    plain = torch.randn(2, 3, 4)
    assert make_target_pixels(plain, normalise=False) is plain


def test_the_loss_counts_hidden_patches_alone() -> None:
    """By hand: patch 0 is visible, patches 1 and 2 are wrong by 1 and by 3 everywhere: (1 + 9) / 2."""
    wanted, predicted = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    predicted[0, 1], predicted[0, 2] = 1.0, 3.0
    places = torch.tensor([[0, 1, 2]])
    assert mae_loss(predicted, wanted, places, num_visible=1).item() == pytest.approx(5.0)
    changed = wanted.clone()
    changed[0, 0] = 100.0
    assert mae_loss(predicted, changed, places, num_visible=1).item() == pytest.approx(5.0)
    assert mae_loss(wanted, wanted, places, num_visible=1).item() == 0


@pytest.mark.parametrize(
    ("patches", "mask", "count"),
    [(64, 0.75, 16), (49, 0.75, 12), (100, 0.8, 20), (10, 0.9, 1), (4, 0.99, 1), (4, 0.01, 3)],
)
def test_so_many_patches_stay_visible(patches, mask, count) -> None:
    """Rounded, not cut off: 100 patches without 80 % are 20, though 100 · (1 - 0.8) is 19.99… in floating point."""
    assert count_visible_patches(patches, mask) == count


def test_masking_is_exact_in_count_and_hides_every_patch_equally_often() -> None:
    noise = draw_epoch_patch_noise(16, num_steps=40, batch_size=100, seed=3, epoch=0).flatten(0, 1)
    visible, places = select_visible_and_restore_indices(noise, 4)
    hidden = places >= 4
    assert (hidden.sum(1) == 12).all()
    assert all((places[row, visible[row]] == torch.arange(4)).all() for row in range(10))
    often = hidden.float().mean(0)  # of 4,000 images: 0.75 ± 0.0068
    assert (often - 0.75).abs().max() < 0.035
    pairs = (hidden.float().T @ hidden.float() / len(hidden))[0, 1:]
    assert (pairs - 0.75 * 11 / 15).abs().max() < 0.04  # no two patches hide together
    assert not torch.equal(
        noise, draw_epoch_patch_noise(16, num_steps=40, batch_size=100, seed=3, epoch=1).flatten(0, 1)
    )


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "rotary", "learned+rotary"])
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_all_patches_visible_in_order_is_the_whole_model(positions, pool) -> None:
    model, images = small(positions=positions, **pool), torch.randn(2, 3, 16, 16)
    everything = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(encode_visible_patches(model, images, everything), model.forward_features(images))


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_the_encoder_does_not_see_what_is_hidden(pool) -> None:
    model, images = small(positions="learned+rotary", qk_norm=True, **pool), torch.randn(2, 3, 16, 16)
    visible, places = select_visible_and_restore_indices(torch.rand(2, 16), 4)
    hidden = (places >= 4)[:, None, :].repeat_interleave(1, 1).view(2, 1, 4, 4)
    pixels = hidden.repeat_interleave(4, 2).repeat_interleave(4, 3)
    changed = torch.where(pixels, torch.randn_like(images), images)
    torch.testing.assert_close(
        encode_visible_patches(model, images, visible), encode_visible_patches(model, changed, visible)
    )
    other = torch.where(pixels, images, torch.randn_like(images))
    assert not torch.allclose(
        encode_visible_patches(model, images, visible), encode_visible_patches(model, other, visible)
    )


def test_the_order_in_which_patches_are_shown_does_not_matter() -> None:
    model, images, noise = small(positions="rotary"), torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    painter = MaskedAutoencoder(model, MaeDecoder(model.config, embed_dim=16, depth=2, num_heads=2), 4).eval()
    reconstruction, places = painter(images, noise)
    shuffled = noise.clone()
    order = select_visible_and_restore_indices(noise, 4)[0]
    shuffled.scatter_(1, order, noise.gather(1, order).flip(1))  # the same four, shown in the opposite order
    again, elsewhere = painter(images, shuffled)
    assert not torch.equal(places, elsewhere)
    torch.testing.assert_close(again, reconstruction)


def test_the_whole_agrees_with_transformers_vitmae() -> None:
    """Its weights in our model and decoder, the same noise: the same pixels, the same loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        image_size=16, patch_size=4, num_channels=3, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, mask_ratio=0.75, norm_pix_loss=True, layer_norm_eps=1e-6,
    )  # fmt: skip
    theirs = transformers.ViTMAEForPreTraining(config).eval()
    model = small(positions="sincos2d")
    decoder = MaeDecoder(model.config, embed_dim=16, depth=2, num_heads=2).eval()
    _take_over(model, decoder, dict(theirs.state_dict()))
    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    with torch.no_grad():
        theirs.vit.embeddings.position_embeddings.copy_(model.pos_embed)  # which other tests compare with MAE's
        theirs.decoder.decoder_pos_embed.copy_(decoder.positions)
        wanted = theirs(images, noise=noise)
        reconstruction, places = MaskedAutoencoder(model, decoder, 4)(images, noise)
    ours = (
        reconstruction.unflatten(2, (3, 4, 4)).permute(0, 1, 3, 4, 2).flatten(2)
    )  # their pixels: rows, columns, channels
    torch.testing.assert_close(ours, wanted.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal((places >= 4).float(), wanted.mask)
    loss = mae_loss(reconstruction, make_target_pixels(patchify(images, 4), normalise=True), places, 4)
    assert loss.item() == pytest.approx(wanted.loss.item(), rel=1e-4)


def _take_over(model: VisionTransformer, decoder: MaeDecoder, theirs: dict) -> None:
    with torch.no_grad():
        model.cls_token.copy_(theirs["vit.embeddings.cls_token"])
        model.patch_embed.proj.weight.copy_(theirs["vit.embeddings.patch_embeddings.projection.weight"])
        model.patch_embed.proj.bias.copy_(theirs["vit.embeddings.patch_embeddings.projection.bias"])
        for name, part in (("vit.layers", model.blocks), ("decoder.decoder_layers", decoder.blocks)):
            for number, block in enumerate(part):
                _block(block, {k.removeprefix(f"{name}.{number}."): v for k, v in theirs.items()})
        for ours, name in ((model.norm, "vit.layernorm"), (decoder.norm, "decoder.decoder_norm")):
            ours.weight.copy_(theirs[f"{name}.weight"])
            ours.bias.copy_(theirs[f"{name}.bias"])
        decoder.embed.weight.copy_(theirs["decoder.decoder_embed.weight"])
        decoder.embed.bias.copy_(theirs["decoder.decoder_embed.bias"])
        decoder.mask_token.copy_(theirs["decoder.mask_token"])
        # Their pixels are in the order rows, columns, channels; ours channels, rows, columns.
        order = torch.arange(48).view(4, 4, 3).permute(2, 0, 1).flatten()
        decoder.pred.weight.copy_(theirs["decoder.decoder_pred.weight"][order])
        decoder.pred.bias.copy_(theirs["decoder.decoder_pred.bias"][order])


def _block(block, theirs: dict) -> None:
    names = {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj",
        "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        packed = [theirs[f"attention.{part}_proj.{kind}"] for part in "qkv"]
        getattr(block.attn.qkv, kind).copy_(torch.cat(packed))
        for ours, name in names.items():
            getattr(block.get_submodule(ours), kind).copy_(theirs[f"{name}.{kind}"])


def test_an_encoder_with_a_local_start_has_a_decoder_with_a_plain_one() -> None:
    recipe = read_recipe("cifar10-mae", ["model.initialize=conv_like"])
    assert count_train_flops_per_image(recipe) == count_train_flops_per_image(read_recipe("cifar10-mae", []))
    MaeDecoder(recipe.model, embed_dim=32, depth=1, num_heads=2)


def test_a_run_leaves_pictures_and_goes_on_as_if_it_had_not_been_stopped(tmp_path) -> None:
    whole = check_goes_on_after_a_stop(tmp_path, **MAE)
    pictures = sorted(file.name for file in whole.get_path("reconstructions").iterdir())
    assert pictures == ["epoch-0001.png", "epoch-0002.png", "epoch-0003.png"]
    assert whole.get_path("reconstructions.png").is_file()
    none = tiny_run(tmp_path, **MAE, **{"mae.pictures": 0})
    assert not none.get_path("reconstructions").exists()


def test_the_recorded_step_learns_what_the_plain_one_learns(tmp_path) -> None:
    """Without biases of keys, which change nothing: their gradient is rounding, which AdamW enlarges."""
    settings = {"train.optimizer": "muon", "train.ema": 0.9, "model.qkv_bias": "false"}
    check_recorded_as_plain(tmp_path, **(MAE | settings))


def test_mae_varies_by_crops_and_mirror_images_alone() -> None:
    photos = complete_augmentation_for_objective(AugmentConfig(), "cifar10", 3, "mae").active_settings
    assert photos == {"flip": 0.5, "crop_scale": (0.2, 1.0)}


REFUSED = {
    "model.tokenizer=conv": "with model.tokenizer=conv tokens overlap",
    "model.tokenizer=spt": "with model.tokenizer=spt tokens overlap",
    "model.causal=true": "causal=true needs all patches in order",
    "model.patch_size=8": "needs at least two patches, but the model has one",
    "mae.mask_ratio=1": "greater than 0 and below 1",
    "mae.decoder_dim=30": "must be a multiple of 4",
    "mae.decoder_heads=5": "and of mae.decoder_heads=5",
    "train.tune=head": "train.tune=head freezes pretrained weights, but there are none",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(word) -> None:
    check_refused("digits-mae", word, REFUSED[word])


def test_the_defaults_of_the_paper() -> None:
    assert MaeConfig().mask_ratio == 0.75 and MaeConfig().norm_pix_loss
