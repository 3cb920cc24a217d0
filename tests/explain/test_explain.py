"""Maps that made the answer, methods against hand-worked examples and brute force, and the evidence for them."""

import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.explain import (
    METHODS,
    attention_maps,
    compute_logits_and_maps,
    correlate_with_shuffled_weights,
    deletion,
    explain,
    get_token_layout,
    insertion,
    integrated_gradients,
    measure_faithfulness,
    relevance,
    rollout,
)
from vitascope.explain.attribution import HEAD_FUSIONS, sum_pixels_per_patch
from vitascope.explain.faithfulness import (
    area_under_curve,
    blur_relative_to_image_size,
    copy_with_shuffled_weights,
    sort_patches_by_importance,
    spearman_correlation_per_image,
)
from vitascope.model import attention
from vitascope.model.replay import AttentionRecorder

KINDS = {
    "class token": {},
    "mean": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 3},
    "rotary": {"class_token": False, "global_pool": "avg", "positions": "learned+rotary", "qk_norm": True},
    "causal": {"class_token": False, "global_pool": "avg", "causal": True},
    "not square": {"img_size": (16, 24), "patch_size": (8, 4)},
    "sequence": {"class_token": False, "global_pool": "seq", "norm": "rmsnorm", "mlp": "swiglu"},
}


def made(**settings) -> VisionTransformer:
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    model = VisionTransformer(ModelConfig(**(small | settings))).double().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def pictures(model: nn.Module, count: int = 3) -> torch.Tensor:
    shape = model.config.image_shape if isinstance(model, VisionTransformer) else (32, 32)
    return torch.randn(count, 3, *shape, dtype=next(model.parameters()).dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_our_maps_are_those_of_an_explicit_computation(kind) -> None:
    model = made(**KINDS[kind])
    images = pictures(model)
    result = attention_maps(model, images, batch=2)
    with torch.no_grad():
        tokens = model.embed(images)
        for block, maps in zip(model.blocks, result, strict=True):
            wanted = block.attn.maps(block.norm1(tokens), rotation=model.rotation)
            torch.testing.assert_close(maps, wanted, atol=1e-12, rtol=0)
            torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]), atol=1e-12, rtol=0)
            tokens = block(tokens, None, model.rotation)
        logits, _ = compute_logits_and_maps(model, images)
        torch.testing.assert_close(logits, model(images), atol=1e-10, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_a_timm_model_s_answer_is_rebuilt_from_its_maps(fused) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=4).double().eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    nn.init.normal_(model.head.weight)
    images = pictures(model, 2)
    with torch.no_grad():
        wanted = model(images)
        logits, maps = compute_logits_and_maps(model, images)
    torch.testing.assert_close(logits, wanted, atol=1e-8, rtol=0)
    assert len(maps) == 12 and maps[0].shape == (2, 3, 17, 17) and maps[0].dtype == torch.float64
    seen = []
    for block in model.blocks:
        assert block.attn.fused_attn is fused  # as it was
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        model(images)  # what timm itself computes when it writes attention out
    for ours, theirs in zip(maps, seen, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_a_transformers_model_s_maps_are_its_own(way) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        attn_implementation=way,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    images = pictures(model, 2)
    maps = attention_maps(model, images)
    assert model.config._attn_implementation == way
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(images, output_attentions=True).attentions
    for ours, their in zip(maps, theirs, strict=True):
        torch.testing.assert_close(ours, their, atol=1e-5, rtol=0)
    assert get_token_layout(model).rows == 4 and get_token_layout(model).num_prefix_tokens == 1


def test_maps_that_do_not_make_the_output_are_refused(monkeypatch) -> None:
    model = made()
    monkeypatch.setattr(
        attention, "compute_attention_maps", lambda query, key, mask: torch.softmax(query @ key.mT, -1)
    )  # no scale
    with pytest.raises(UserError, match="Block 1: the attention maps do not reproduce the block's output"):
        attention_maps(model, pictures(model))


def test_a_caller_s_own_scale_and_shared_keys_are_kept() -> None:
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    wanted = F.scaled_dot_product_attention(query, key, value, scale=0.7, enable_gqa=True)
    with AttentionRecorder() as watching:
        output = F.scaled_dot_product_attention(query, key, value, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(output, wanted)
    assert watching.maps[0].shape == (1, 4, 5, 6)


@pytest.mark.parametrize("fusion", HEAD_FUSIONS)
@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
def test_rollout_rows_sum_to_one_for_every_image(fusion, discard) -> None:
    maps = [torch.rand(4, 3, 7, 7).double().softmax(-1) for _ in range(5)]
    through = rollout(maps, fusion=fusion, discard=discard)
    torch.testing.assert_close(through.sum(-1), torch.ones(4, 7).double())
    alone = rollout([block[2:3] for block in maps], fusion=fusion, discard=discard)
    torch.testing.assert_close(through[2:3], alone)


def test_rollout_of_two_tokens_by_hand() -> None:
    first, second = (
        torch.tensor(rows).double()[None, None] for rows in ([[0.5, 0.5], [0.2, 0.8]], [[0.9, 0.1], [0.4, 0.6]])
    )
    wanted = torch.tensor([[[0.7175, 0.2825], [0.23, 0.77]]]).double()
    torch.testing.assert_close(rollout([first, second]), wanted)  # the other order gives 0.7625, 0.2375, 0.275, 0.725
    uniform = torch.full((1, 2, 4, 4), 0.25)
    torch.testing.assert_close(rollout([uniform])[0, 0, 1:], torch.full((3,), 0.125))


def test_relevance_of_two_tokens_by_hand() -> None:
    maps, gradients = (
        torch.tensor(rows).double()[None, None] for rows in ([[0.5, 0.5], [0.2, 0.8]], [[1.0, -2.0], [3.0, 0.5]])
    )
    torch.testing.assert_close(relevance([maps], [gradients]), torch.tensor([[[1.5, 0.0], [0.6, 1.4]]]).double())
    torch.testing.assert_close(relevance([maps], [0 * gradients]), torch.eye(2).double()[None])


def test_hiding_is_brute_force() -> None:
    model = made(img_size=(16, 24), patch_size=(8, 4))
    images = pictures(model, 2)
    heat = explain(model, images, "occlusion", target=3)
    with torch.no_grad():
        for image in range(2):
            for row in range(2):
                for column in range(6):
                    hidden = images[image : image + 1].clone()
                    hidden[..., 8 * row : 8 * row + 8, 4 * column : 4 * column + 4] = 0
                    fall = model(images)[image].softmax(0)[3] - model(hidden)[0].softmax(0)[3]
                    assert heat[image, row, column] == pytest.approx(fall.item(), abs=1e-12)


def test_integrated_gradients_sum_to_the_difference_they_explain() -> None:
    model = made()
    images, targets = pictures(model), torch.tensor([0, 4, 2])
    attribution = integrated_gradients(model, images, targets, steps=200)
    with torch.no_grad():
        change = model(images) - model(torch.zeros_like(images))
    torch.testing.assert_close(
        attribution.sum((1, 2, 3)), change.gather(1, targets[:, None])[:, 0], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(
        sum_pixels_per_patch(attribution, get_token_layout(model)).sum((1, 2)), attribution.sum((1, 2, 3))
    )


def one_patch_matters(looked_at: float) -> tuple[VisionTransformer, torch.Tensor]:
    """Read aloud: the class token looks at patch 5 with this weight and at patch 9 with the rest; it hands on their
    brightness; the head says class 1 if it is bright. Patch 9 is grey in the image, so only patch 5 can count."""
    model = VisionTransformer(
        ModelConfig(
            img_size=16, patch_size=4, embed_dim=4, depth=1, num_heads=1, num_classes=2, norm="none", qkv_bias=False
        )
    ).double().eval()  # fmt: skip
    for weight in model.parameters():
        nn.init.zeros_(weight)
    with torch.no_grad():
        model.patch_embed.proj.weight[2] = 1 / 48  # feature 2: the patch's brightness
        model.cls_token[0, 0, 1] = 1.0  # feature 1: being the class token
        model.pos_embed[0, 1:, 0] = -40.0  # feature 0: being worth a look
        model.pos_embed[0, 6, 0], model.pos_embed[0, 10, 0] = 2 * math.log(looked_at), 2 * math.log(1 - looked_at)
        model.pos_embed[0, 0, 0] = -40.0
        qkv = model.blocks[0].attn.qkv.weight
        qkv[0, 1] = 1.0  # the class token asks
        qkv[4, 0] = 1.0  # how much a token is worth a look
        qkv[8 + 2, 2] = 1.0  # and is handed its brightness
        model.blocks[0].attn.proj.weight[2, 2] = 1.0
        model.head.weight[1, 2] = 4.0
    image = torch.randn(1, 3, 16, 16).double()
    image[..., 4:8, 4:8] = 1.0  # patch 5
    image[..., 8:12, 4:8] = 0.0  # patch 9
    return model, image


RANKS = {"attention": 2, "rollout": 2, "rollout-max": 2}  # they cannot know that patch 9 has nothing to say


@pytest.mark.parametrize("method", METHODS)
def test_the_patch_that_makes_the_answer_is_found(method) -> None:
    model, image = one_patch_matters(looked_at=0.3)
    assert attention_maps(model, image)[0][0, 0, 0, 6] == pytest.approx(0.3, abs=1e-6)
    heat = explain(model, image, method, target=1)
    rank = 1 + sort_patches_by_importance(heat)[0].tolist().index(5)
    assert rank == RANKS.get(method, 1)


def test_the_evidence_prefers_the_patch_that_makes_the_answer() -> None:
    model, image = one_patch_matters(looked_at=0.5)
    targets, layout = torch.tensor([1]), get_token_layout(model)
    right, wrong = torch.zeros(1, 4, 4).double(), torch.zeros(1, 4, 4).double()
    right[0, 1, 1], wrong[0, 3, 3] = 1.0, 1.0
    falls = deletion(model, image, right, targets, layout)
    assert falls.shape == (1, 17)
    assert falls[0, 0] > falls[0, 1] and falls[0, 1].item() == pytest.approx(falls[0, -1].item())
    assert area_under_curve(falls) < area_under_curve(deletion(model, image, wrong, targets, layout))
    rises = insertion(model, image, right, targets, layout)
    assert rises[0, -1].item() == pytest.approx(falls[0, 0].item()) and rises[0, 1] > rises[0, 0]
    assert area_under_curve(rises) > area_under_curve(insertion(model, image, wrong, targets, layout))


def test_areas_ranks_and_blur_by_hand() -> None:
    assert (
        area_under_curve(torch.tensor([[1.0, 0.5, 0.0]])).item() == 0.5
        and area_under_curve(torch.ones(1, 9)).item() == 1.0
    )
    assert sort_patches_by_importance(torch.tensor([[[1.0, 3.0], [3.0, 0.0]]])).tolist() == [[1, 2, 0, 3]]
    first = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert spearman_correlation_per_image(first, first.exp()).item() == pytest.approx(1)
    assert spearman_correlation_per_image(first, -first).item() == pytest.approx(-1)
    assert spearman_correlation_per_image(first, torch.zeros_like(first)).item() == 0
    flat = torch.full((1, 3, 12, 12), 0.7)
    torch.testing.assert_close(blur_relative_to_image_size(flat), flat)
    assert blur_relative_to_image_size(torch.randn(1, 1, 16, 16)).std() < 0.5


def test_the_table_has_every_method_and_a_random_order_with_the_best_first() -> None:
    model, image = one_patch_matters(looked_at=0.5)
    rows = measure_faithfulness(model, image.repeat(3, 1, 1, 1))
    assert {row.method for row in rows} == {*METHODS, "random"} and all(row.images == 3 for row in rows)
    gains = [row.insertion - row.deletion for row in rows]
    assert gains == sorted(gains, reverse=True) and rows[0].method != "random"


def test_a_model_with_shuffled_weights_has_other_explanations() -> None:
    model = made()
    shuffled = copy_with_shuffled_weights(model)
    assert not torch.equal(shuffled.head.weight, model.head.weight)
    assert torch.equal(shuffled.head.weight.flatten().sort().values, model.head.weight.flatten().sort().values)
    assert abs(correlate_with_shuffled_weights(model, pictures(model, 8), "occlusion")) < 0.5


def test_mistakes_get_one_sentence() -> None:
    model = made()
    images = pictures(model)
    for call, words in (
        (
            lambda: explain(model, images, "saliency"),
            "The method 'saliency' is unknown. Choose one of attention, attention-gradient, integ",
        ),
        (lambda: explain(model, images, target=5), "There is no class 5: the model has classes 0 to 4"),
        (lambda: get_token_layout(model).get_token_index(4, 0), "There is no patch in row 4, column 0"),
        (lambda: rollout([torch.rand(1, 1, 2, 2)], fusion="sum"), "fusion='sum' is unknown"),
        (lambda: rollout([torch.rand(1, 1, 2, 2)], discard=1.0), "discard=1.0 must be"),
        (lambda: attention_maps(model.train(), images), "Call model.eval"),
        (lambda: attention_maps(nn.Flatten().eval(), images), "its attention maps cannot be recorded"),
        (lambda: get_token_layout(nn.Flatten()), "The patch grid of Flatten is unknown"),
    ):
        with pytest.raises(UserError, match=words):
            call()
