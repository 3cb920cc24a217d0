"""Muon, groups, schedule, average: laws and numbers by hand."""

import math

import pytest
import torch
from torch import nn

from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.build import make_optimizers, set_learning_rates
from vitascope.training.optim.muon import Muon, orthogonalise, orthogonalise_and_scale_updates
from vitascope.training.optim.schedule import AveragedModel, compute_ema_decay, compute_lr_factor

CONFIG = ModelConfig(
    img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, qk_norm=True, init_values=0.1
)


def test_singular_values_land_near_one_whatever_they_were() -> None:
    left, right = (torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0] for _ in range(2))
    matrix = left[:, :8] @ torch.diag(torch.logspace(0, -1.5, 8, dtype=torch.float64)) @ right[:8]
    values = torch.linalg.svdvals(orthogonalise(matrix[None])[0])[:8]
    assert values.min() > 0.6 and values.max() < 1.25


def test_orthogonalising_one_number_is_five_steps_of_the_polynomial() -> None:
    assert orthogonalise(torch.ones(1, 1, 1, dtype=torch.float64)).item() == pytest.approx(0.6964, abs=2e-4)
    two = orthogonalise(torch.eye(2, dtype=torch.float64)[None])[0]
    torch.testing.assert_close(two, torch.eye(2, dtype=torch.float64) * 1.1081, atol=2e-4, rtol=0)


def test_orthogonalising_ignores_scale_and_follows_turns_and_transposes() -> None:
    u = torch.randn(1, 6, 4, dtype=torch.float64)
    q, r = (torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] for size in (6, 4))
    expected = orthogonalise(u)
    torch.testing.assert_close(orthogonalise(7 * u), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(orthogonalise(q @ u @ r), q @ expected @ r, atol=1e-6, rtol=0)
    torch.testing.assert_close(orthogonalise(u.mT), expected.mT, atol=1e-6, rtol=0)
    assert (orthogonalise(torch.zeros(2, 3, 3)) == 0).all()


def test_a_batch_of_matrices_is_each_alone_and_qkv_is_three() -> None:
    updates = [torch.randn(12, 4), torch.randn(4, 4), torch.randn(12, 4), torch.randn(4, 12)]
    together = orthogonalise_and_scale_updates(updates, matrices_per_update=[1, 1, 1, 1])
    for update, step in zip(updates, together, strict=True):
        rows, columns = update.shape
        expected = orthogonalise(update[None])[0] * max(1, rows / columns) ** 0.5
        torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-4)
    packed, beside = orthogonalise_and_scale_updates(
        updates[:2], matrices_per_update=[3, 1]
    )  # parts go into the batch of whole matrices
    torch.testing.assert_close(beside, together[1], atol=1e-5, rtol=1e-4)
    for part, update in zip(packed.chunk(3), updates[0].chunk(3), strict=True):
        torch.testing.assert_close(part, orthogonalise(update[None])[0], atol=1e-5, rtol=1e-4)


def test_a_muon_step_by_hand() -> None:
    weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
    optimizer = Muon([{"params": [weight]}], lr=0.1, momentum=0.9, weight_decay=0.5)
    weight.grad = torch.eye(2, dtype=torch.float64)
    optimizer.step()
    expected = torch.eye(2, dtype=torch.float64) * (0.95 - 0.1 * 1.1081)
    torch.testing.assert_close(weight.data, expected, atol=1e-4, rtol=0)


def test_muon_remembers_gradients_and_looks_ahead() -> None:
    """m ← 0.9 m + 0.1 g, and the step goes along 0.1 g + 0.9 m (Nesterov)."""
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    optimizer = Muon([{"params": [weight]}], lr=0.1, momentum=0.9, weight_decay=0.0)
    gradients = torch.randn(3, 3, 4, dtype=torch.float64)
    average = torch.zeros(3, 4, dtype=torch.float64)
    for gradient in gradients:
        before, weight.grad = weight.detach().clone(), gradient.clone()
        optimizer.step()
        average = 0.9 * average + 0.1 * gradient
        expected = before - 0.1 * orthogonalise((0.1 * gradient + 0.9 * average)[None])[0]
        torch.testing.assert_close(weight.data, expected, atol=1e-10, rtol=0)


def test_only_matrices_are_decayed_and_only_the_blocks_matrices_go_to_muon() -> None:
    model = VisionTransformer(CONFIG)
    names = {id(weight): name for name, weight in model.named_parameters()}
    adamw, muon = make_optimizers(model, TrainConfig(optimizer="muon", weight_decay=0.3))
    by_muon = {names[id(weight)] for group in muon.param_groups for weight in group["params"]}
    kinds = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert by_muon == {f"blocks.{block}.{kind}.weight" for block in (0, 1) for kind in kinds}
    assert {group["parts"] for group in muon.param_groups} == {1, 3}
    decayed = {names[id(w)] for group in adamw.param_groups if group["weight_decay"] for w in group["params"]}
    assert decayed == {"patch_embed.proj.weight", "head.weight"}
    everyone = [weight for optimizer in (adamw, muon) for group in optimizer.param_groups for weight in group["params"]]
    assert len(everyone) == len({id(weight) for weight in everyone}) == len(names)


def test_layer_decay_is_beits() -> None:
    config = ModelConfig(img_size=8, patch_size=4, embed_dim=4, depth=12, num_heads=1, num_classes=3)
    model = VisionTransformer(config)
    [adamw] = make_optimizers(model, TrainConfig(layer_decay=0.65))
    peaks = {id(weight): group["peak"] / 1e-3 for group in adamw.param_groups for weight in group["params"]}
    named = dict(model.named_parameters())
    for name, scale in (
        ("patch_embed.proj.weight", 0.003697),
        ("cls_token", 0.003697),
        ("blocks.0.mlp.fc1.weight", 0.005688),
        ("blocks.11.norm1.bias", 0.65),
        ("head.weight", 1.0),
    ):
        assert peaks[id(named[name])] == pytest.approx(scale, rel=1e-3), name
    set_learning_rates([adamw], 0.5)
    assert all(group["lr"] == group["peak"] * 0.5 for group in adamw.param_groups)


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.2 + 0.8 * 0.5),
        ("linear", 55, 0.2 + 0.8 * 0.5),
        ("linear", 99, 0.2 + 0.8 / 90),
        ("constant", 99, 1.0),
    ],
)
def test_the_schedule_by_hand(schedule, step, factor) -> None:
    config = TrainConfig(schedule=schedule, warmup=0.1, final_lr=0.0 if schedule == "constant" else 0.2)
    assert compute_lr_factor(step, 100, config) == pytest.approx(factor)


def test_a_rate_that_never_falls_has_no_final_one() -> None:
    with pytest.raises(UserError, match=r"has no effect with train\.schedule=constant"):
        TrainConfig(schedule="constant", final_lr=0.2)


def test_the_average_follows_by_its_decay() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = AveragedModel(model)
    nn.init.ones_(model.weight)
    average.update_parameters(model, compute_ema_decay(10_000, 0.9))
    assert average.model.weight.item() == pytest.approx(0.1)
    early = AveragedModel(model)
    nn.init.zeros_(model.weight)
    early.update_parameters(model, compute_ema_decay(0, 0.9))
    assert early.model.weight.item() == pytest.approx(0.1)  # decay 1/10 at first


def test_the_loss_of_mixed_and_smoothed_labels_by_hand() -> None:
    from vitascope.data.augment import MixedLabels
    from vitascope.training.objectives.classify import cross_entropy

    target = MixedLabels(torch.tensor([0]), torch.tensor([1]), torch.tensor([0.7]))
    logits = torch.randn(1, 10)
    wanted = torch.full((10,), 0.01)
    wanted[0], wanted[1] = 0.64, 0.28  # smoothing 0.1 over 10 classes, mixed 0.7 to 0.3
    expected = -(wanted * logits.log_softmax(1)[0]).sum()
    assert cross_entropy(logits, target, 0.1, None).item() == pytest.approx(expected.item(), abs=1e-6)
    assert math.isclose(wanted.sum().item(), 1, abs_tol=1e-6)
