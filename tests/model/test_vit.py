"""The complete model: order of patches, shapes, settings, compilers, errors."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model.combinations import TINY, settings
from vitascope import ModelConfig, UserError, VisionTransformer, patchify, unpatchify
from vitascope.model.config import GLOBAL_POOLS, MLPS, POSITIONS
from vitascope.recipe.reading import read_model_config


def model(**changes) -> VisionTransformer:
    vit = VisionTransformer(replace(TINY, **changes)).double().eval()
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit


def images(config: ModelConfig, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, config.in_chans, *config.image_shape, dtype=torch.float64)


@given(settings=settings)
def test_every_combination_the_config_accepts_runs_forwards_and_backwards(settings) -> None:
    try:
        config = replace(TINY, **settings)
    except UserError:
        return
    vit = VisionTransformer(config).double()
    pictures = images(config)
    tokens = vit.forward_features(pictures)
    assert tokens.shape == (2, config.num_tokens, 16)
    logits = vit(pictures)
    assert logits.shape == (2, config.num_classes or 16)
    logits.square().sum().backward()
    unused = [name for name, weight in vit.named_parameters() if weight.grad is None]
    assert unused == []


@given(settings=settings)
def test_what_the_head_does_not_read_is_not_computed_and_nothing_else_changes(settings) -> None:
    """`forward` skips tokens of the last block; logits and gradients are those of computing all tokens."""
    torch.manual_seed(0)  # every example from the same draws, so that a failing one fails again
    try:
        vit = VisionTransformer(replace(TINY, **settings)).double()
    except UserError:
        return
    for weight in vit.parameters():
        torch.nn.init.normal_(weight, std=0.1)  # without norms, more would grow beyond float64's digits
    pictures = images(vit.config)
    grads = []
    for logits in (vit(pictures), vit.forward_head(vit.forward_features(pictures))):
        vit.zero_grad()
        logits.sin().sum().backward()
        grads.append([logits.detach(), *(weight.grad.clone() for weight in vit.parameters())])
    for result, expected in zip(*grads, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("first", [1, 2])
def test_a_block_gives_its_first_tokens_alone_under_any_mask(first) -> None:
    block = model(qk_norm=True).blocks[0]
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    for mask in (None, torch.rand(5, 5) > 0.3, torch.rand(2, 5, 5) > 0.3, torch.rand(2, 2, 5, 5) > 0.3):
        torch.testing.assert_close(block(tokens, mask, num_output_tokens=first), block(tokens, mask)[:, :first])


@given(settings=settings)
def test_a_state_dict_holds_parameters_and_nothing_else(settings) -> None:
    try:
        vit = VisionTransformer(replace(TINY, **settings))
    except UserError:
        return
    assert set(vit.state_dict()) == {name for name, _ in vit.named_parameters()}


@given(
    positions=st.sampled_from(POSITIONS),
    pool=st.sampled_from(GLOBAL_POOLS),
    grid=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    registers=st.integers(0, 2),
)
def test_the_order_of_patches_matters_only_with_positions(positions, pool, grid, registers) -> None:
    size = (grid[0] * 4, grid[1] * 4)
    vit = model(positions=positions, global_pool=pool, img_size=size, reg_tokens=registers)
    pictures = images(vit.config)
    order = torch.arange(grid[0] * grid[1]).roll(1)
    shuffled = unpatchify(patchify(pictures, 4)[:, order], 4, grid)
    difference = (vit(pictures) - vit(shuffled)).abs().max()
    assert difference < 1e-8 if positions == "none" else difference > 1e-5


def test_sheet_a_has_no_norm_no_positions_one_head_and_the_published_block() -> None:
    vit = VisionTransformer(read_model_config("sheet-a")).double()
    names = {name.split(".", 2)[-1] for name in vit.state_dict() if name.startswith("blocks")}
    assert names == {f"{part}.{kind}" for part in ("attn.qkv", "mlp.fc1", "mlp.fc2") for kind in ("weight", "bias")}
    assert vit.blocks[0].mlp.fc1.weight.shape == (64, 64)
    assert 0.5 < vit.cls_token.std() < 1.5
    x = torch.randn(1, 17, 64, dtype=torch.float64)
    block = vit.blocks[0]
    query, key, value = (
        x @ weight.T + bias
        for weight, bias in zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True)
    )
    after = x + (query @ key.mT / 8).softmax(-1) @ value
    torch.testing.assert_close(block(x), after + block.mlp(after))
    shuffled = x[:, torch.cat([torch.tensor([0]), 1 + torch.randperm(16)])]
    torch.testing.assert_close(vit.encode(x)[:, 0], vit.encode(shuffled)[:, 0])


def test_sheet_c_encodes_embeddings_directly() -> None:
    vit = VisionTransformer(ModelConfig(img_size=32, patch_size=4, embed_dim=256, depth=2, num_heads=4))
    assert vit.encode(torch.randn(2, 65, 256)).shape == (2, 65, 256)
    assert vit.encode(torch.randn(2, 9, 256)).shape == (2, 9, 256)
    pictures = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(vit.encode(vit.embed(pictures)), vit.forward_features(pictures))


@given(registers=st.integers(0, 2), class_token=st.booleans(), positions=st.sampled_from(POSITIONS))
def test_a_causal_models_token_ignores_later_patches(registers, class_token, positions) -> None:
    vit = model(causal=True, global_pool="avg", reg_tokens=registers, class_token=class_token, positions=positions)
    pictures = images(TINY)
    changed = pictures.clone()
    changed[:, :, 4:, 4:] += 1  # the last patch
    before, after = vit.forward_features(pictures), vit.forward_features(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], atol=1e-12, rtol=0)
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-6


def test_sequence_pooling_without_a_preference_is_mean_pooling() -> None:
    vit = model(global_pool="seq")
    torch.nn.init.zeros_(vit.pool.score.weight)
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(vit.pool(tokens), tokens[:, 1:].mean(1))


def test_checkpointing_changes_memory_not_gradients() -> None:
    plain, recomputed = model(), model(grad_checkpointing=True)
    recomputed.load_state_dict(plain.state_dict())
    pictures, calls = images(TINY), []
    for name, vit in (("plain", plain), ("recomputed", recomputed)):
        vit.blocks[0].mlp.register_forward_hook(lambda *_, name=name: calls.append(name))
        vit.train()(pictures).square().sum().backward()
    assert calls == ["plain", "recomputed", "recomputed"]
    for result, expected in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(result.grad, expected.grad)


def test_stochastic_depth_drops_whole_branches_per_image_and_keeps_the_mean() -> None:
    from vitascope.model.block import DropPath

    drop, ones = DropPath(0.25), torch.ones(4000, 3, 2)
    out = drop(2 * ones, ones) - 2
    per_image = out[:, 0, 0]
    assert torch.equal(out, per_image[:, None, None].expand_as(out))
    assert sorted(per_image.unique().tolist()) == pytest.approx([0, 4 / 3], rel=1e-6)
    assert per_image.mean() == pytest.approx(1, abs=0.05)
    assert torch.equal(drop.eval()(2 * ones, ones), 3 * ones)


def test_a_branch_is_kept_where_its_noise_is_below_the_keep_probability() -> None:
    from vitascope.model.block import DropPath

    drop, noise = DropPath(0.25), torch.tensor([0.0, 0.749, 0.75, 0.999])
    tokens, branch = torch.randn(4, 3, 2, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    out = drop(tokens, branch, noise)
    torch.testing.assert_close(out[:2], tokens[:2] + branch[:2] / 0.75)
    assert torch.equal(out[2:], tokens[2:])
    assert torch.equal(drop.eval()(tokens, branch, noise), tokens + branch)


def test_noise_is_given_to_attention_and_mlp_of_each_block_in_turn() -> None:
    vit = model(depth=3, drop_path_rate=0.5, init_values=0.5).train()
    pictures, noise = images(TINY, batch=8), torch.rand(8, 6)
    tokens = vit.embed(pictures)
    for index, (block, keep) in enumerate(zip(vit.blocks, (1.0, 0.75, 0.5), strict=True)):
        scales = (noise[:, 2 * index : 2 * index + 2] < keep).double() / keep
        tokens = tokens + scales[:, 0, None, None] * block.ls1(block.attn(block.norm1(tokens)))
        tokens = tokens + scales[:, 1, None, None] * block.ls2(block.mlp(block.norm2(tokens)))
    torch.testing.assert_close(vit(pictures, noise), vit.forward_head(vit.norm(tokens)))
    recomputed = model(depth=3, drop_path_rate=0.5, init_values=0.5, grad_checkpointing=True).train()
    recomputed.load_state_dict(vit.state_dict())
    for each in (vit, recomputed):
        each(pictures, noise).square().sum().backward()
    for result, expected in zip(recomputed.parameters(), vit.parameters(), strict=True):
        torch.testing.assert_close(result.grad, expected.grad)


@pytest.mark.parametrize("pool", GLOBAL_POOLS)
def test_with_its_noise_an_image_does_not_depend_on_the_others_of_its_batch(pool) -> None:
    vit = model(depth=4, drop_path_rate=0.5, global_pool=pool).train()
    pictures, noise = images(TINY, batch=8), torch.rand(8, 8)
    parts = [vit(pictures[rows], noise[rows]) for rows in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(torch.cat(parts), vit(pictures, noise), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("rate", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"])
def test_every_dropout_acts_in_training_and_only_there(rate) -> None:
    vit, pictures = model(**{rate: 0.5}), images(TINY, batch=8)
    assert torch.equal(vit(pictures), vit(pictures))
    vit.train()
    assert not torch.equal(vit(pictures), vit(pictures))


def test_every_branch_of_every_block_has_its_own_place_on_the_linear_rule() -> None:
    blocks = model(depth=5, drop_path_rate=0.4).blocks
    rates = [(block.drop_path1.rate, block.drop_path2.rate) for block in blocks]
    assert rates == [(pytest.approx(rate), pytest.approx(rate)) for rate in (0, 0.1, 0.2, 0.3, 0.4)]


@pytest.mark.parametrize("mlp", MLPS)
def test_the_mlp_is_its_formula_and_drops_twice(mlp) -> None:
    part = model(mlp=mlp, proj_drop_rate=0.5).blocks[0].mlp
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    wide = x @ part.fc1.weight.T + part.fc1.bias
    gate, value = wide.chunk(2, dim=-1)
    hidden = {
        "gelu": wide * (1 + torch.erf(wide / 2**0.5)) / 2,
        "relu2": wide.clamp(min=0) ** 2,
        "swiglu": gate * torch.sigmoid(gate) * value,
    }[mlp]
    torch.testing.assert_close(part(x), hidden @ part.fc2.weight.T + part.fc2.bias)
    dropped = part.train()(x)
    assert 0.2 < (dropped == 0).double().mean() < 0.8  # the second dropout's zeros are in the output itself


def test_fixed_positions_leave_class_and_register_tokens_at_the_start() -> None:
    table = model(positions="sincos2d", reg_tokens=1).pos_embed
    assert (table[0, :2] == 0).all() and (table[0, 2:].square().sum(-1) - 8).abs().max() < 1e-5


def test_rotary_base_is_heard() -> None:
    pictures = images(TINY)
    near, far = model(positions="rotary", rotary_base=2.0), model(positions="rotary", rotary_base=1000.0)
    far.load_state_dict(near.state_dict())
    assert (near(pictures) - far(pictures)).abs().max() > 1e-4


def test_the_torch_start_draws_tokens_and_positions_from_a_unit_normal() -> None:
    vit = VisionTransformer(ModelConfig(embed_dim=192, num_heads=3, depth=1, reg_tokens=4, initialize="torch"))
    for parameter in (vit.cls_token, vit.reg_token, vit.pos_embed):
        assert parameter.std().item() == pytest.approx(1, abs=0.15)


def test_the_start_weights_are_timms() -> None:
    import timm

    result = VisionTransformer(ModelConfig(depth=2, reg_tokens=8))
    expected = timm.models.VisionTransformer(depth=2, reg_tokens=8).state_dict()
    for name, tensor in result.state_dict().items():
        assert tensor.std().item() == pytest.approx(expected[name].std().item(), rel=0.1, abs=1e-9), name
        assert tensor.mean().item() == pytest.approx(expected[name].mean().item(), abs=2e-3), name


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*online softmax:UserWarning"
)
@pytest.mark.parametrize("changes", [{}, {"positions": "learned+rotary", "qk_norm": True, "global_pool": "avg"}])
def test_compiling_exporting_and_copying_agree_with_eager(changes) -> None:
    vit, pictures = model(**changes).float(), images(TINY).float()
    expected = vit(pictures)
    copied = copy.deepcopy(vit)
    exported = torch.export.export(vit, (pictures,)).module()
    compiled = torch.compile(vit, fullgraph=True)
    for other in (copied, exported, compiled):
        torch.testing.assert_close(other(pictures), expected, atol=1e-5, rtol=0)
    compiled(pictures).sum().backward()
    assert all(weight.grad is not None for weight in vit.parameters())
    any_batch = torch.export.export(vit, (pictures,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(any_batch(pictures[:1]), expected[:1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda vit: vit(torch.randn(3, 8, 8)), "batch × channel × height × width.*images\\[None\\]"),
        (lambda vit: vit(torch.randn(2, 1, 8, 8)), "1 channels, the model was built for in_chans=3"),
        (lambda vit: vit(torch.randn(2, 3, 8, 12)), "8×12 pixels, the model was built for 8×8"),
        (lambda vit: vit(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), "uint8; the model needs floats"),
        (lambda vit: vit(torch.zeros(2, 3, 8, 8).double()), "float64, the weights torch.float32"),
        (lambda vit: vit.encode(torch.randn(2, 5, 8)), "8 features"),
        (lambda vit: vit.encode(torch.randn(5, 16)), "batch × token × feature"),
        (lambda vit: vit(torch.zeros(2, 3, 8, 8), torch.rand(2, 3)), r"shape \[2, 3\], but 2 images and 4 residual"),
    ],
)
def test_wrong_images_are_refused_in_a_sentence(call, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        call(VisionTransformer(TINY))


def test_a_rotary_model_refuses_tokens_it_has_no_place_for() -> None:
    with pytest.raises(UserError, match="needs the 5 tokens of a 2×2 grid"):
        VisionTransformer(replace(TINY, positions="rotary")).encode(torch.randn(1, 4, 16))
