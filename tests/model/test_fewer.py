"""Merging and dropping tokens at inference: laws, and a second implementation that goes patch by patch."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.model.combinations import TINY
from vitascope import ModelConfig, VisionTransformer
from vitascope.model import token_merging as fewer_tokens
from vitascope.model.token_merging import TokenGroups, drop_least_attended_patches, merge_similar_patches

GRID = replace(TINY, img_size=16, reg_tokens=1)  # 16 patches, class token, one register


def crowd_of(tokens: torch.Tensor, sizes: list[float] | None = None) -> TokenGroups:
    count = tokens.shape[1]
    given = torch.ones(count) if sizes is None else torch.tensor(sizes)
    return TokenGroups(tokens, given.expand(len(tokens), -1), torch.arange(count).expand(len(tokens), -1))


def merged_one_by_one(tokens, key, sizes, prefix, fewer):
    """One image: lists instead of tensors."""
    likes = F.normalize(key.mean(0), dim=-1)
    first, second = list(range(prefix, len(tokens), 2)), list(range(prefix + 1, len(tokens), 2))
    pairs = []
    for one in first:
        scores = [float(likes[one] @ likes[other]) for other in second]
        pairs.append((max(scores), one, second[scores.index(max(scores))]))
    going = sorted(pairs, key=lambda pair: -pair[0])[:fewer]
    groups = {token: [token] for token in range(len(tokens)) if token not in {one for _, one, _ in going}}
    for _, one, other in going:
        groups[other].append(one)
    order = [*range(prefix), *(one for one in first if one in groups), *second]
    total = [sum(sizes[i] for i in groups[token]) for token in order]
    means = [sum(sizes[i] * tokens[i] for i in groups[token]) / sum(sizes[i] for i in groups[token]) for token in order]
    return torch.stack(means), total, order


@pytest.mark.parametrize(("prefix", "patches", "fewer"), [(0, 8, 3), (2, 9, 4), (1, 6, 3), (1, 2, 1)])
def test_merging_equals_merging_one_by_one(prefix, patches, fewer) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(2, prefix + patches, 6, dtype=torch.float64)
    key = torch.randn(2, 2, prefix + patches, 3, dtype=torch.float64)
    sizes = [1.0] * prefix + [float(1 + number % 3) for number in range(patches)]
    found = merge_similar_patches(crowd_of(tokens, sizes), key, prefix, fewer)
    for image in range(2):
        means, total, order = merged_one_by_one(tokens[image], key[image], sizes, prefix, fewer)
        assert torch.allclose(found.tokens[image], means)
        assert found.sizes[image].tolist() == total
        assert found.position_indices[image].tolist() == order
    assert found.sizes.sum(1).tolist() == [sum(sizes)] * 2  # every patch is still counted


@pytest.mark.parametrize("attention", ["plain", "lsa"])
@pytest.mark.parametrize("pool", ["token", "avg", "seq"])
def test_merging_twins_changes_nothing(pool, attention, monkeypatch) -> None:
    """Patches of which half have a twin: one that counts twice is the same as two, in attention and in pooling."""
    torch.manual_seed(0)
    config = replace(TINY, img_size=16, positions="none", global_pool=pool, depth=3, attention=attention)
    model = VisionTransformer(config).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # so that attention is far from uniform
    fewer = VisionTransformer(replace(config, merge_tokens=4)).double().eval()
    fewer.load_state_dict(model.state_dict())
    monkeypatch.setattr(ModelConfig, "num_removed_per_block", [4, 0, 0])  # the four twins meet in the first block
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    twins = images.clone()
    twins[..., :8, 4:8], twins[..., :8, 12:] = images[..., :8, :4], images[..., :8, 8:12]
    assert torch.allclose(fewer(twins), model(twins), atol=1e-10)
    assert not torch.allclose(fewer(images), model(images), atol=1e-3)


def test_who_is_left_keeps_its_place() -> None:
    """Dropped patches must not shift the others' rotary positions: attention over the kept ones, written out."""
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
    kept = maps.mean((0, 1, 2)).topk(11).indices.sort().values
    tokens = (tokens + first.attn.mix(maps, normed))[:, kept]
    tokens = tokens + first.mlp(first.norm2(tokens))
    normed, table = second.norm1(tokens), model.rotation[:, kept]
    maps = second.attn.maps(normed, rotation=table)
    tokens = tokens + second.attn.mix(maps, normed)
    left = maps.mean((0, 1, 2)).topk(6).indices.sort().values
    tokens = tokens[:, left]
    tokens = tokens + second.mlp(second.norm2(tokens))
    assert torch.allclose(model.forward_head(model.norm(tokens)), model(images), atol=1e-10)


def test_a_local_token_is_never_left_alone() -> None:
    config = replace(TINY, img_size=16, attention="lsa", class_token=False, global_pool="avg", drop_tokens=15)
    assert config.num_removed_per_block == [14, 0]
    merging = VisionTransformer(replace(config, drop_tokens=0, merge_tokens=8, depth=6)).eval()
    assert merging.config.num_removed_per_block == [8, 4, 2, 1, 0, 0]  # one is left, which looks at what it stands for
    assert torch.isfinite(merging(torch.randn(2, 3, 16, 16))).all()


def test_dropping_leaves_out_who_is_least_looked_at() -> None:
    tokens = torch.arange(5.0)[None, :, None].expand(1, 5, 2)
    maps = torch.tensor([[0.1, 0.3, 0.05, 0.35, 0.2]] + [[0.2, 0.1, 0.4, 0.1, 0.2]] * 4)[None, None]
    by_class = drop_least_attended_patches(crowd_of(tokens), maps, 1, 2, by_class_token=True)
    assert by_class.tokens[0, :, 0].tolist() == [0, 1, 3]
    by_all = drop_least_attended_patches(crowd_of(tokens), maps, 1, 2, by_class_token=False)
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
def test_fewer_tokens_at_inference_with_everything_else(setting, changes) -> None:
    torch.manual_seed(0)
    config = replace(GRID, depth=4, **changes)
    whole = VisionTransformer(config)
    fewer = VisionTransformer(replace(config, **{setting: 3}))
    fewer.load_state_dict(whole.state_dict())
    images = torch.randn(5, 3, *config.image_shape)
    assert torch.allclose(fewer(images), whole(images), atol=1e-5)  # in training nothing is left out
    whole.eval()
    fewer.eval()
    assert torch.isfinite(fewer(images)).all()
    assert not torch.allclose(fewer(images), whole(images), atol=1e-5)
    assert torch.allclose(fewer(images)[2:3], fewer(images[2:3]), atol=1e-5)  # each image for itself
    assert torch.allclose(fewer.forward_features(images), whole.forward_features(images))


def test_the_last_blocks_shortcut_changes_nothing() -> None:
    model = VisionTransformer(replace(GRID, merge_tokens=3)).eval()
    images = torch.randn(2, 3, 16, 16)
    tokens, sizes = fewer_tokens.encode_with_reduction(model, model.embed(images), None)
    assert tokens.shape[1] == 18 - 3 - 3 and sizes.sum(1).tolist() == [18.0, 18.0]
    assert torch.allclose(model.forward_head(tokens, token_sizes=sizes), model(images), atol=1e-6)


def test_every_patch_knows_its_token_at_the_end() -> None:
    """Groups are as large as their tokens' sizes say; dropped patches belong to none."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    merging = VisionTransformer(replace(GRID, merge_tokens=3)).eval()
    owner = fewer_tokens.assign_patches_to_tokens(merging, images)
    _, sizes = fewer_tokens.encode_with_reduction(merging, merging.embed(images), None)
    for image in range(2):
        counted = torch.bincount(owner[image], minlength=sizes.shape[1])
        assert counted[2:].tolist() == sizes[image, 2:].tolist()  # without class token and register
    dropping = VisionTransformer(replace(GRID, drop_tokens=3)).eval()
    assert (fewer_tokens.assign_patches_to_tokens(dropping, images) < 0).sum(1).tolist() == [6, 6]
