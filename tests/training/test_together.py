"""Many models at once: equal to training each alone, in float64, with everything that does not need chance inside."""

import pytest
import torch

from tests.training.test_captured import losses_of
from tests.training.test_runs import session_of
from vitascope import UserError, kernels
from vitascope.training.engines import batchable as alike
from vitascope.training.engines.batched import BatchedTraining
from vitascope.training.loader import EpochLoader
from vitascope.training.step import MetricSums

PLAIN = {"train.epochs": 2, "train.device": "cpu", "train.precision": "float32", "train.threads": 1}


def doubled(folder, **settings):
    """A session that computes in float64."""
    session, _ = session_of(folder, **(PLAIN | settings))
    for module in (session.model, *([session.ema.model] if session.ema else [])):
        module.double()
    real = session.objective.prepare_batch

    def prepare(*given):
        return tuple(part.double() if part.is_floating_point() else part for part in real(*given))

    session.objective.prepare_batch = prepare
    return session


WAYS = {
    "adamw": {"train.optimizer": "adamw", "train.ema": 0},
    "muon, averaged, mixed": {"train.optimizer": "muon", "train.ema": 0.9, "data.augment.cutmix": 1.0},
    "class token, rotary, qk-norm": {
        "model.class_token": "true",
        "model.global_pool": "token",
        "model.positions": "learned+rotary",
        "model.qk_norm": "true",
        "model.norm": "rmsnorm",
        "model.mlp": "relu2",
    },
}
WAYS["class token"] = {"model.class_token": "true", "model.global_pool": "token", "train.optimizer": "adamw"}
OWN = [
    {"train.seed": 1},
    {"train.seed": 2, "train.lr": 5e-3, "train.weight_decay": 0.2},
    {"train.seed": 3, "train.muon_lr": 0.05},
]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_three_models_together_are_three_models_alone(tmp_path, way) -> None:
    alone = []
    for own in OWN:
        session = doubled(tmp_path, **way, **own)
        losses_of(session, EpochLoader(session), MetricSums.empty(session), 2)
        alone.append(session)
    crowd = BatchedTraining([doubled(tmp_path, **way, **own) for own in OWN])
    start = [dict(session.model.state_dict()) for session in crowd.sessions]
    for epoch in range(2):
        losses, right = crowd.train_epoch(epoch)
    crowd.close()
    crowd.copy_weights_to_sessions()
    for number, (session, single) in enumerate(zip(crowd.sessions, alone, strict=True)):
        for name, weight in single.eval_model.state_dict().items():
            torch.testing.assert_close(session.eval_model.state_dict()[name], weight, atol=1e-9, rtol=1e-7)
        assert any(not torch.equal(start[number][name], w) for name, w in single.model.state_dict().items())
    assert losses.shape == (3,) and losses.isfinite().all() and len(losses.unique()) == 3
    assert ((right > 0) & (right < 1)).all()


REFUSED = [
    ([{}, {"model.depth": 3}], "differ in nothing but train.seed, lr"),
    ([{}, {"train.batch_size": 32}], "differ in nothing but train.seed, lr"),
    ([{"model.drop_path_rate": 0.1}] * 2, "do not support dropout and stochastic depth"),
    ([{"train.layer_decay": 0.8}] * 2, "do not support train.layer_decay=0.8"),
    ([{"train.objective": "mae"}] * 2, "must train from scratch with labels"),
    ([{"data.balance": "loss"}] * 2, "do not support data.balance"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_learn_together_is_refused(tmp_path, settings, text) -> None:
    with pytest.raises(UserError, match=text):
        BatchedTraining([session_of(tmp_path, **(PLAIN | own))[0] for own in settings])


def test_warming_up_leaves_no_trace(tmp_path) -> None:
    """What a GPU does before it records the step: afterwards all is as it was, and the epoch is the same."""
    way = WAYS["muon, averaged, mixed"]
    fresh, warm = (BatchedTraining([doubled(tmp_path, **way, **own) for own in OWN]) for _ in range(2))
    warm._load_epoch(0)
    with warm._restore_state_on_exit():
        warm._run_warm_up_steps()
        assert not torch.equal(warm.weight_table, fresh.weight_table)
    for _ in range(2):
        assert torch.equal(fresh.train_epoch(0), warm.train_epoch(0)) and torch.equal(
            fresh.weight_table, warm.weight_table
        )
    assert torch.equal(fresh.ema_table, warm.ema_table)
    fresh.close()
    warm.close()


@pytest.mark.parametrize("kernel", ["written", "own"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_pytorch_s_fused_attention_is_never_batched_over_models(tmp_path, way, kernel, monkeypatch) -> None:
    """On CUDA its gradients would be wrong, silently: there `requires_grad` is False inside `vmap`."""
    if kernel == "own" and (not kernels.HAS_TRITON or way is not WAYS["class token"]):
        pytest.skip("our kernel needs Triton; where a class token asks alone, it is not for the last block")

    def refuse(*_, **__):
        raise AssertionError("PyTorch's fused attention was asked")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    monkeypatch.setattr(alike, "choose_attention_kernel", lambda _: kernel)
    small = {"train.precision": "bfloat16", "data.fraction": 0.05, "train.batch_size": 8, "train.epochs": 1}
    small |= {"model.embed_dim": 64, "model.depth": 2, "model.qk_norm": "false"}
    crowd = BatchedTraining([session_of(tmp_path, **(PLAIN | small | way | own))[0] for own in OWN[:2]])
    assert crowd.train_epoch(0).isfinite().all()
    crowd.close()


def test_in_bfloat16_many_models_compute_what_one_computes(tmp_path) -> None:
    """Products come out narrow, as they do alone: a kernel that wants bfloat16 gets it."""
    settings = PLAIN | {"train.precision": "bfloat16", "train.ema": 0}
    sessions = [session_of(tmp_path, **settings, **own)[0] for own in OWN]
    images = torch.rand(3, 4, 1, 8, 8)
    with sessions[0].hardware.autocast():
        alone = [session.model(seen) for session, seen in zip(sessions, images, strict=True)]
    crowd, formats = BatchedTraining(sessions), set()
    crowd.first_session.model.blocks[0].attn.qkv.register_forward_hook(lambda *told: formats.add(told[-1].dtype))
    together = crowd._compute_logits(crowd.weights, images)
    assert formats == {torch.bfloat16}
    for said, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(said.float(), wanted.float(), atol=0.02, rtol=0.05)
    crowd.close()


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not on this system")
def test_many_models_learn_the_same_with_our_attention_kernel(tmp_path, monkeypatch) -> None:
    """Forward and backward over all models at once: what a GPU does, here by Triton's interpreter."""
    from vitascope.kernels import short_attention

    settings = {"train.precision": "bfloat16", "train.optimizer": "adamw", "train.ema": 0, "train.epochs": 1}
    settings |= {"model.embed_dim": 64, "model.depth": 1, "data.fraction": 0.05, "train.batch_size": 8}
    settings |= {"model.qk_norm": "false", "model.positions": "learned"}
    learnt, asked = {}, []
    real = short_attention.short_attention
    monkeypatch.setattr(short_attention, "short_attention", lambda *given: asked.append(given) or real(*given))
    for kernel in ("written", "own"):
        monkeypatch.setattr(alike, "choose_attention_kernel", lambda _, kernel=kernel: kernel)
        crowd = BatchedTraining([session_of(tmp_path, **(PLAIN | settings | own))[0] for own in OWN[:2]])
        before = crowd.weight_table.clone()
        told = crowd.train_epoch(0)
        learnt[kernel] = told, crowd.weight_table - before
        crowd.close()
        assert bool(asked) == (kernel == "own")
    torch.testing.assert_close(learnt["own"][0], learnt["written"][0], rtol=2e-3, atol=2e-3)
    wanted = learnt["written"][1]
    assert (learnt["own"][1] - wanted).norm() < 0.1 * wanted.norm()


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
@pytest.mark.parametrize("compiled", ["never", "always"])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_on_a_gpu_many_models_learn_what_one_learns(tmp_path, pool, compiled, unchecked_shapes) -> None:
    """In bfloat16, recorded, with our attention kernel: losses epoch by epoch, and that something is learnt at all."""
    settings = {"train.epochs": 12, "train.device": "cuda", "train.precision": "bfloat16", "train.compile": compiled}
    settings |= {"train.optimizer": "adamw", "train.lr": 3e-3, "data.augment.mixup": 0, "train.label_smoothing": 0}
    settings |= {"model.embed_dim": 64, "model.num_heads": 2, "model.depth": 3, "model.global_pool": pool}
    settings |= {"model.class_token": str(pool == "token").lower(), "model.qk_norm": "false"}
    settings |= {"model.positions": "learned", "model.drop_path_rate": 0}
    alone = []
    seeds = [{"train.seed": seed} for seed in (1, 2)]
    for own in seeds:
        session, _ = session_of(tmp_path, **(settings | own))
        sums = losses_of(session, EpochLoader(session), MetricSums.empty(session), 12)
        alone.append([total / session.steps_per_epoch for total in sums])
    crowd = BatchedTraining([session_of(tmp_path, **(settings | own))[0] for own in seeds])
    assert crowd.first_session.model.blocks[0].attn.kernel == "own"
    found = torch.stack([crowd.train_epoch(number)[0] for number in range(12)], dim=1)
    crowd.close()
    assert found.tolist() == [pytest.approx(losses, rel=0.1) for losses in alone]
    assert (found[:, -1] < 0.85 * found[:, 0]).all()
