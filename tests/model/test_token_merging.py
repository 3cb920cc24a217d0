"""Merging and dropping tokens at inference: invariants, and a second implementation, patch by patch."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.model.combinations import TINY
from vitascope import ModelConfig, VisionTransformer
from vitascope.model.explicit_blocks import apply_reducing_blocks_and_final_norm, compute_final_token_index_per_patch
from vitascope.model.token_merging import TokenGroups, drop_least_attended_patches, merge_similar_patches

GRID = replace(TINY, img_size=16, reg_tokens=1)  # 16 patches, class token, one register


def make_groups(tokens: torch.Tensor, sizes: list[float] | None = None) -> TokenGroups:
    count = tokens.shape[1]
    size_tensor = torch.ones(count) if sizes is None else torch.tensor(sizes)
    return TokenGroups(tokens, size_tensor.expand(len(tokens), -1), torch.arange(count).expand(len(tokens), -1))


def merge_one_by_one(tokens, key, sizes, prefix, num_removed):
    """One image: lists instead of tensors."""
    normalized = F.normalize(key.mean(0), dim=-1)
    first, second = list(range(prefix, len(tokens), 2)), list(range(prefix + 1, len(tokens), 2))
    pairs = []
    for one in first:
        scores = [float(normalized[one] @ normalized[other]) for other in second]
        pairs.append((max(scores), one, second[scores.index(max(scores))]))
    merged_pairs = sorted(pairs, key=lambda pair: -pair[0])[:num_removed]
    groups = {token: [token] for token in range(len(tokens)) if token not in {one for _, one, _ in merged_pairs}}
    for _, one, other in merged_pairs:
        groups[other].append(one)
    order = [*range(prefix), *(one for one in first if one in groups), *second]
    total = [sum(sizes[i] for i in groups[token]) for token in order]
    means = [sum(sizes[i] * tokens[i] for i in groups[token]) / sum(sizes[i] for i in groups[token]) for token in order]
    return torch.stack(means), total, order


@pytest.mark.parametrize(("prefix", "patches", "num_removed"), [(0, 8, 3), (2, 9, 4), (1, 6, 3), (1, 2, 1)])
def test_merging_equals_merging_one_by_one(prefix, patches, num_removed) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(2, prefix + patches, 6, dtype=torch.float64)
    key = torch.randn(2, 2, prefix + patches, 3, dtype=torch.float64)
    sizes = [1.0] * prefix + [float(1 + index % 3) for index in range(patches)]
    merged = merge_similar_patches(make_groups(tokens, sizes), key, prefix, num_removed)
    for image in range(2):
        means, total, order = merge_one_by_one(tokens[image], key[image], sizes, prefix, num_removed)
        assert torch.allclose(merged.tokens[image], means)
        assert merged.sizes[image].tolist() == total
        assert merged.position_indices[image].tolist() == order
    assert merged.sizes.sum(1).tolist() == [sum(sizes)] * 2  # every patch is still counted


@pytest.mark.parametrize("attention", ["plain", "lsa"])
@pytest.mark.parametrize("pool", ["token", "avg", "seq"])
def test_merging_identical_patches_changes_nothing(pool, attention, monkeypatch) -> None:
    """One token of size two equals two identical tokens, in attention and in pooling."""
    torch.manual_seed(0)
    config = replace(TINY, img_size=16, positions="none", global_pool=pool, depth=3, attention=attention)
    model = VisionTransformer(config).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # so that attention is far from uniform
    reduced_model = VisionTransformer(replace(config, merge_tokens=4)).double().eval()
    reduced_model.load_state_dict(model.state_dict())
    monkeypatch.setattr(ModelConfig, "num_removed_per_block", [4, 0, 0])  # the four pairs are merged in the first block
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    twins = images.clone()
    twins[..., :8, 4:8], twins[..., :8, 12:] = images[..., :8, :4], images[..., :8, 8:12]
    assert torch.allclose(reduced_model(twins), model(twins), atol=1e-10)
    assert not torch.allclose(reduced_model(images), model(images), atol=1e-3)


def test_remaining_patches_keep_their_rotary_positions() -> None:
    """Dropped patches do not shift the rotary positions of the others: compared with explicit attention."""
    torch.manual_seed(0)
    settings = {"positions": "rotary", "global_pool": "avg", "class_token": False, "reg_tokens": 0, "init_values": None}
    model = VisionTransformer(replace(GRID, **settings, depth=2, drop_tokens=5)).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    first, second = model.blocks
    tokens = model.embed(images)
    normed = first.norm1(tokens)
    maps = first.attn.maps(normed, rotation=model.rotation)
    kept_indices = maps.mean((0, 1, 2)).topk(11).indices.sort().values
    tokens = (tokens + first.attn.mix(maps, normed))[:, kept_indices]
    tokens = tokens + first.mlp(first.norm2(tokens))
    normed, table = second.norm1(tokens), model.rotation[:, kept_indices]
    maps = second.attn.maps(normed, rotation=table)
    tokens = tokens + second.attn.mix(maps, normed)
    remaining_indices = maps.mean((0, 1, 2)).topk(6).indices.sort().values
    tokens = tokens[:, remaining_indices]
    tokens = tokens + second.mlp(second.norm2(tokens))
    assert torch.allclose(model.forward_head(model.norm(tokens)), model(images), atol=1e-10)


def test_with_lsa_a_token_always_has_something_to_attend_to() -> None:
    config = replace(TINY, img_size=16, attention="lsa", class_token=False, global_pool="avg", drop_tokens=15)
    assert config.num_removed_per_block == [14, 0]
    merging = VisionTransformer(replace(config, drop_tokens=0, merge_tokens=8, depth=6)).eval()
    assert merging.config.num_removed_per_block == [8, 4, 2, 1, 0, 0]  # the last token attends to its own patches
    assert torch.isfinite(merging(torch.randn(2, 3, 16, 16))).all()


def test_dropping_removes_the_patches_with_the_least_attention() -> None:
    tokens = torch.arange(5.0)[None, :, None].expand(1, 5, 2)
    maps = torch.tensor([[0.1, 0.3, 0.05, 0.35, 0.2]] + [[0.2, 0.1, 0.4, 0.1, 0.2]] * 4)[None, None]
    by_class = drop_least_attended_patches(make_groups(tokens), maps, 1, 2, by_class_token=True)
    assert by_class.tokens[0, :, 0].tolist() == [0, 1, 3]
    by_all = drop_least_attended_patches(make_groups(tokens), maps, 1, 2, by_class_token=False)
    assert by_all.position_indices[0].tolist() == [0, 2, 4]


@pytest.mark.parametrize("setting", ["merge_tokens", "drop_tokens"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_pool": "avg", "class_token": False, "positions": "learned+rotary", "qk_norm": True},
        {"global_pool": "seq", "attention": "lsa", "tokenizer": "spt", "norm": "rmsnorm", "mlp": "relu2"},
        {"img_size": (8, 20), "init_values": None},
    ],
)
def test_token_reduction_works_with_other_settings(setting, changes) -> None:
    torch.manual_seed(0)
    config = replace(GRID, depth=4, **changes)
    full_model = VisionTransformer(config)
    reduced_model = VisionTransformer(replace(config, **{setting: 3}))
    reduced_model.load_state_dict(full_model.state_dict())
    images = torch.randn(5, 3, *config.image_shape)
    assert torch.allclose(reduced_model(images), full_model(images), atol=1e-5)  # no reduction in training
    full_model.eval()
    reduced_model.eval()
    assert torch.isfinite(reduced_model(images)).all()
    assert not torch.allclose(reduced_model(images), full_model(images), atol=1e-5)
    assert torch.allclose(reduced_model(images)[2:3], reduced_model(images[2:3]), atol=1e-5)  # independent of the batch
    assert torch.allclose(reduced_model.forward_features(images), full_model.forward_features(images))


def test_computing_only_the_class_token_in_the_last_block_changes_nothing() -> None:
    model = VisionTransformer(replace(GRID, merge_tokens=3)).eval()
    images = torch.randn(2, 3, 16, 16)
    tokens, sizes = apply_reducing_blocks_and_final_norm(model, model.embed(images), None)
    assert tokens.shape[1] == 18 - 3 - 3 and sizes.sum(1).tolist() == [18.0, 18.0]
    assert torch.allclose(model.forward_head(tokens, token_sizes=sizes), model(images), atol=1e-6)


def test_every_patch_is_assigned_to_a_token() -> None:
    """Groups have the size of their token; dropped patches have none."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    merging = VisionTransformer(replace(GRID, merge_tokens=3)).eval()
    token_indices = compute_final_token_index_per_patch(merging, images)
    _, sizes = apply_reducing_blocks_and_final_norm(merging, merging.embed(images), None)
    for image in range(2):
        group_sizes = torch.bincount(token_indices[image], minlength=sizes.shape[1])
        assert group_sizes[2:].tolist() == sizes[image, 2:].tolist()  # without class token and register
    dropping = VisionTransformer(replace(GRID, drop_tokens=3)).eval()
    assert (compute_final_token_index_per_patch(dropping, images) < 0).sum(1).tolist() == [6, 6]
