"""Lion is timm's, step by step; SOAP is its published algorithm. Both learn and resume exactly."""

import copy

import pytest
import timm.optim
import torch
from torch import nn

from tests.training.test_captured import check_recorded_as_plain
from tests.training.test_runs import check_goes_on_after_a_stop
from tests.training.tiny import TINY, shared_run
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.recipe.choices import OPTIMIZERS, load_optimizer
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.train import TrainConfig
from vitascope.training.engines.prepare_batched import check_batchable
from vitascope.training.optim.adamw import AdamW
from vitascope.training.optim.build import make_optimizers
from vitascope.training.optim.lion import Lion
from vitascope.training.optim.soap import Soap

LEARNING = {  # rates of this tiny model
    "lion": {"train.lr": 3e-3, "train.betas": "[0.9,0.99]"},
    "soap": {"train.lr": 3e-2, "train.betas": "[0.95,0.95]"},
}
of_both = pytest.mark.parametrize("name", LEARNING)


def test_lion_is_timms_step_by_step() -> None:
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(5, 7), (3,), (2, 3, 4)]]
    theirs = copy.deepcopy(ours)
    groups = [{"params": [0, 1], "weight_decay": 0.3}, {"params": [2], "weight_decay": 0.0, "lr": 3e-3}]
    pair = [
        kind([group | {"params": [params[i] for i in group["params"]]} for group in groups], 1e-2, betas=(0.8, 0.97))
        for kind, params in ((Lion, ours), (timm.optim.Lion, theirs))
    ]
    for step in range(20):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one) * 10 ** torch.randint(-6, 3, ()).item()
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)  # a schedule
            optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(pair[0].state[one]["exp_avg"], pair[1].state[other]["exp_avg"])


class SoapByThePaper:
    """Algorithms 3 and 4 of Vyas et al. 2024, line by line, with Adam's bias correction and decoupled decay.

    As in the authors' code, the first gradient only initializes the preconditioners."""

    def __init__(self, weight, lr, b1, b2, decay, frequency) -> None:
        self.weight, self.lr, self.b1, self.b2, self.decay, self.frequency = weight, lr, b1, b2, decay, frequency
        self.m, self.v, self.t = torch.zeros_like(weight), torch.zeros_like(weight), -1

    def step(self, g) -> None:
        self.t += 1
        if self.t == 0:
            self.l, self.r = (1 - self.b2) * g @ g.T, (1 - self.b2) * g.T @ g
            self.ql, self.qr = (torch.linalg.eigh(p)[1].flip(1) for p in (self.l, self.r))
            return
        g_rotated = self.ql.T @ g @ self.qr
        self.m = self.b1 * self.m + (1 - self.b1) * g
        m_rotated = self.ql.T @ self.m @ self.qr
        self.v = self.b2 * self.v + (1 - self.b2) * g_rotated**2
        m_hat, v_hat = m_rotated / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        n = self.ql @ (m_hat / (v_hat.sqrt() + 1e-8)) @ self.qr.T
        self.weight = (1 - self.lr * self.decay) * self.weight - self.lr * n
        self.l = self.b2 * self.l + (1 - self.b2) * g @ g.T
        self.r = self.b2 * self.r + (1 - self.b2) * g.T @ g
        if self.t % self.frequency == 0:
            self.ql, self.qr = torch.linalg.qr(self.l @ self.ql)[0], torch.linalg.qr(self.r @ self.qr)[0]


def test_soap_is_the_papers_algorithm_step_by_step() -> None:
    # Square, so that the first gradient has one eigenbasis (up to signs, which cancel).
    weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
    ours = Soap([{"params": [weight]}], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    paper = SoapByThePaper(weight.detach().clone(), 0.02, 0.9, 0.95, 0.1, frequency=10)
    start = weight.detach().clone()
    for step in range(35):
        weight.grad = torch.randn(5, 5, dtype=torch.float64)
        paper.step(weight.grad)
        ours.step()
        torch.testing.assert_close(weight.data, paper.weight, atol=1e-12, rtol=1e-10)
        assert torch.equal(weight, start) == (step == 0)


def test_soap_follows_rotations_of_the_gradient_where_adam_does_not() -> None:
    """Adam runs in the eigenbasis: rotating all gradients rotates the steps."""
    gradients = torch.randn(25, 4, 4, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] for size in (4, 4))

    def train(kind, gradients) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        optimizer = kind([{"params": [weight]}], lr=0.1, betas=(0.9, 0.95))
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    rotated = left @ gradients @ right
    torch.testing.assert_close(train(Soap, rotated), left @ train(Soap, gradients) @ right, atol=1e-8, rtol=0)
    assert not torch.allclose(train(AdamW, rotated), left @ train(AdamW, gradients) @ right, atol=1e-2)


def test_soap_takes_the_blocks_matrices_and_lion_everything() -> None:
    model = VisionTransformer(ModelConfig(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3))
    matrices = {name for name, weight in model.named_parameters() if name.startswith("blocks.") and weight.ndim == 2}
    names = {id(weight): name for name, weight in model.named_parameters()}
    adamw, soap = make_optimizers(model, TrainConfig(optimizer="soap", weight_decay=0.3))
    assert {names[id(weight)] for weight in soap.params} == matrices
    assert {names[id(weight)] for weight in adamw.params} == set(names.values()) - matrices
    assert all(group["weight_decay"] == 0.3 for group in soap.param_groups)
    [lion] = make_optimizers(model, TrainConfig(optimizer="lion", weight_decay=0.3, betas=(0.9, 0.99), lr=1e-4))
    assert {names[id(weight)] for weight in lion.params} == set(names.values())
    for group in lion.param_groups:
        assert group["betas"] == (0.9, 0.99) and group["lr"] == 1e-4
        assert {weight.ndim >= 2 for weight in group["params"]} == {True} or group["weight_decay"] == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_dict_trains_all_parameters_once(name) -> None:
    model = VisionTransformer(ModelConfig(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3))
    optimizers = make_optimizers(model, TrainConfig(optimizer=name, final_weight_decay=0.2, layer_decay=0.8))
    assert isinstance(optimizers[-1], load_optimizer(name))
    trained = [weight for optimizer in optimizers for weight in optimizer.params]
    assert {id(weight) for weight in trained} == {id(weight) for weight in model.parameters()}
    assert len(trained) == len(list(model.parameters()))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert all(group["weight_decay"] == 0 and group["peak"] > 0 for group in groups)
    assert any(group["decayed"] for group in groups)


@of_both
def test_both_learn_digits(tmp_path, name) -> None:
    plain = {f"data.augment.{part}": 0 for part in ("mixup", "shift", "rotate", "scale")} | {"train.ema": 0}
    sizes = {"model.embed_dim": 32, "train.optimizer": name, "train.epochs": 25}
    run = shared_run(tmp_path, **plain, **sizes, **LEARNING[name])
    assert run.metrics[-1]["val_accuracy"] > 0.85


@of_both
def test_a_run_is_resumed_bit_by_bit(tmp_path, name) -> None:
    settings = {"train.optimizer": name, "train.ema": 0.9, "train.layer_decay": 0.8, "train.final_weight_decay": 0.1}
    check_goes_on_after_a_stop(tmp_path, **settings, **LEARNING[name])


def test_a_cuda_graph_can_record_lion_but_not_soap(tmp_path, monkeypatch) -> None:
    from vitascope.training import hardware

    assert Lion.is_capturable and not Soap.is_capturable
    settings = {"train.optimizer": "lion", "train.lr": 1e-4, "model.proj_drop_rate": 0, "model.qkv_bias": "false"}
    check_recorded_as_plain(tmp_path, **settings)
    monkeypatch.setattr(hardware, "choose_or_check_device", lambda device: "cuda")
    model, words = (
        nn.Linear(1, 1),
        [f"{key}={value}" for key, value in (TINY | {"train.precision": "bfloat16"}).items()],
    )
    for name, graph in (("lion", True), ("adamw", True), ("soap", False)):
        chosen = hardware.choose_hardware_and_set_threads(
            read_recipe("digits", [*words, f"train.optimizer={name}"]), model, 10
        )
        assert chosen.captured == graph
    always = read_recipe("digits", [*words, "train.optimizer=soap", "train.cuda_graph=always"])
    with pytest.raises(UserError, match=r"needs a CUDA device and no train\.optimizer=soap; this run uses cuda"):
        hardware.choose_hardware_and_set_threads(always, model, 10)


@of_both
def test_batched_runs_refuse_them(name) -> None:
    recipe = read_recipe("digits", [f"train.optimizer={name}", "model.drop_path_rate=0"])
    with pytest.raises(UserError, match=f"do not support train.optimizer={name}. Use adamw or muon"):
        check_batchable([recipe])


def test_an_unknown_optimizer_or_objective_is_refused_with_the_nearest_name() -> None:
    for word, nearest in (("train.optimizer=sopa", "soap"), ("train.objective=simim", "simmim")):
        with pytest.raises(UserError, match=f"is unknown. Did you mean {nearest}"):
            read_recipe("digits", [word])
