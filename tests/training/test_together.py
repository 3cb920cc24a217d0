"""Batched training: several models in one computation equal the models trained alone, in float64."""

import pytest
import torch

from tests.training.test_captured import train_epochs
from tests.training.test_runs import build_state_and_run
from vitascope import UserError, kernels
from vitascope.kernels.launch import restore_tensors_on_exit
from vitascope.training.engines import prepare_batched
from vitascope.training.engines.batched import WARM_UP_STEPS, BatchedTraining
from vitascope.training.engines.single_run import make_engine
from vitascope.training.step import MetricSums

PLAIN = {"train.epochs": 2, "train.device": "cpu", "train.precision": "float32", "train.threads": 1}


def build_float64_state(folder, **settings):
    """Create a state that computes in float64."""
    state, _ = build_state_and_run(folder, **(PLAIN | settings))
    for module in (state.model, *([state.ema.model] if state.ema else [])):
        module.double()
    real = state.objective.augment_batch

    def prepare(*args):
        return tuple(part.double() if part.is_floating_point() else part for part in real(*args))

    state.objective.augment_batch = prepare
    return state


VARIANTS = {
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
VARIANTS["class token"] = {"model.class_token": "true", "model.global_pool": "token", "train.optimizer": "adamw"}
PER_RUN_SETTINGS = [
    {"train.seed": 1},
    {"train.seed": 2, "train.lr": 5e-3, "train.weight_decay": 0.2},
    {"train.seed": 3, "train.muon_lr": 0.05},
]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_three_batched_models_equal_three_models_trained_alone(tmp_path, variant) -> None:
    alone = []
    for overrides in PER_RUN_SETTINGS:
        state = build_float64_state(tmp_path, **variant, **overrides)
        train_epochs(state, make_engine(state, MetricSums.empty(state)), 2)
        alone.append(state)
    batched = BatchedTraining([build_float64_state(tmp_path, **variant, **overrides) for overrides in PER_RUN_SETTINGS])
    start = [dict(state.model.state_dict()) for state in batched.states]
    for epoch in range(2):
        losses, accuracies = batched.train_epoch(epoch)
    batched.close()
    batched.copy_weights_and_ema_to_states()
    for index, (state, single) in enumerate(zip(batched.states, alone, strict=True)):
        for name, weight in single.eval_model.state_dict().items():
            torch.testing.assert_close(state.eval_model.state_dict()[name], weight, atol=1e-9, rtol=1e-7)
        assert any(not torch.equal(start[index][name], w) for name, w in single.model.state_dict().items())
    assert losses.shape == (3,) and losses.isfinite().all() and len(losses.unique()) == 3
    assert ((accuracies > 0) & (accuracies < 1)).all()


REFUSED = [
    ([{}, {"model.depth": 3}], "differ in nothing but train.seed, lr"),
    ([{}, {"train.batch_size": 32}], "differ in nothing but train.seed, lr"),
    ([{"model.drop_path_rate": 0.1}] * 2, "do not support dropout and stochastic depth"),
    ([{"train.layer_decay": 0.8}] * 2, "do not support train.layer_decay=0.8"),
    ([{"train.objective": "mae"}] * 2, "must train from scratch with labels"),
    ([{"data.balance": "loss"}] * 2, "do not support data.balance"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_runs_that_cannot_be_batched_are_refused(tmp_path, settings, text) -> None:
    with pytest.raises(UserError, match=text):
        BatchedTraining([build_state_and_run(tmp_path, **(PLAIN | overrides))[0] for overrides in settings])


def test_warm_up_steps_do_not_change_the_state(tmp_path) -> None:
    """Before a GPU captures the step, it runs warm-up steps; afterwards the state is restored."""
    variant = VARIANTS["muon, averaged, mixed"]
    fresh, warm = (
        BatchedTraining([build_float64_state(tmp_path, **variant, **overrides) for overrides in PER_RUN_SETTINGS])
        for _ in range(2)
    )
    warm.start_epoch(0)
    with warm._restore_state_on_exit():
        for _ in range(WARM_UP_STEPS):
            warm._run_warm_up_step()
        assert not torch.equal(warm.weight_table, fresh.weight_table)
    for _ in range(2):
        for fresh_values, warm_values in zip(fresh.train_epoch(0), warm.train_epoch(0), strict=True):
            assert torch.equal(fresh_values, warm_values)
        assert torch.equal(fresh.weight_table, warm.weight_table)
    assert torch.equal(fresh.ema_table, warm.ema_table)
    fresh.close()
    warm.close()


def test_an_error_in_a_warm_up_step_leaves_the_tensors_as_they_were() -> None:
    tensor = torch.zeros(3)

    def add_and_fail() -> None:
        tensor.add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), restore_tensors_on_exit([tensor]):
        add_and_fail()
    assert torch.equal(tensor, torch.zeros(3))


@pytest.mark.parametrize("kernel", ["written", "own"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_pytorch_s_fused_attention_is_never_batched_over_models(tmp_path, variant, kernel, monkeypatch) -> None:
    """On CUDA its gradients would be wrong, silently: there `requires_grad` is False inside `vmap`."""
    if kernel == "own" and (not kernels.HAS_TRITON or variant is not VARIANTS["class token"]):
        pytest.skip("the Triton kernel is not used for the last block with a class token")

    def refuse(*_, **__):
        raise AssertionError("PyTorch's fused attention was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    monkeypatch.setattr(prepare_batched, "choose_batchable_attention_kernel", lambda _: kernel)
    small = {"train.precision": "bfloat16", "data.fraction": 0.05, "train.batch_size": 8, "train.epochs": 1}
    small |= {"model.embed_dim": 64, "model.depth": 2, "model.qk_norm": "false"}
    batched = BatchedTraining(
        [
            build_state_and_run(tmp_path, **(PLAIN | small | variant | overrides))[0]
            for overrides in PER_RUN_SETTINGS[:2]
        ]
    )
    assert torch.stack(batched.train_epoch(0)).isfinite().all()
    batched.close()


def test_in_bfloat16_many_models_compute_what_one_computes(tmp_path) -> None:
    """Linear layers return bfloat16, as in a single model, so kernels for bfloat16 can be used."""
    settings = PLAIN | {"train.precision": "bfloat16", "train.ema": 0}
    states = [build_state_and_run(tmp_path, **settings, **overrides)[0] for overrides in PER_RUN_SETTINGS]
    images = torch.rand(3, 4, 1, 8, 8)
    with states[0].hardware.autocast():
        alone = [state.model(batch) for state, batch in zip(states, images, strict=True)]
    batched, formats = BatchedTraining(states), set()
    batched.first_state.model.blocks[0].attn.qkv.register_forward_hook(lambda *args: formats.add(args[-1].dtype))
    logits = batched._compute_logits_of_all_models(batched.weights, images)
    assert formats == {torch.bfloat16}
    for actual, expected in zip(logits, alone, strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), atol=0.02, rtol=0.05)
    batched.close()


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not on this system")
def test_batched_models_train_the_same_with_the_triton_attention_kernel(tmp_path, monkeypatch) -> None:
    """Forward and backward pass over all models, as on a GPU, here with Triton's interpreter."""
    from vitascope.kernels import short_attention

    settings = {"train.precision": "bfloat16", "train.optimizer": "adamw", "train.ema": 0, "train.epochs": 1}
    settings |= {"model.embed_dim": 64, "model.depth": 1, "data.fraction": 0.05, "train.batch_size": 8}
    settings |= {"model.qk_norm": "false", "model.positions": "learned"}
    results, calls = {}, []
    real = short_attention.short_attention
    monkeypatch.setattr(short_attention, "short_attention", lambda *args: calls.append(args) or real(*args))
    for kernel in ("written", "own"):
        monkeypatch.setattr(prepare_batched, "choose_batchable_attention_kernel", lambda _, kernel=kernel: kernel)
        batched = BatchedTraining(
            [build_state_and_run(tmp_path, **(PLAIN | settings | overrides))[0] for overrides in PER_RUN_SETTINGS[:2]]
        )
        before = batched.weight_table.clone()
        metrics = torch.stack(batched.train_epoch(0))
        results[kernel] = metrics, batched.weight_table - before
        batched.close()
        assert bool(calls) == (kernel == "own")
    torch.testing.assert_close(results["own"][0], results["written"][0], rtol=2e-3, atol=2e-3)
    expected = results["written"][1]
    assert (results["own"][1] - expected).norm() < 0.1 * expected.norm()


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
@pytest.mark.parametrize("compiled", ["never", "always"])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_on_a_gpu_batched_models_train_as_single_models(tmp_path, pool, compiled, unchecked_shapes) -> None:
    """In bfloat16, as a CUDA graph, with the Triton attention kernel: the losses of each epoch agree, and they fall."""
    settings = {"train.epochs": 12, "train.device": "cuda", "train.precision": "bfloat16", "train.compile": compiled}
    settings |= {"train.optimizer": "adamw", "train.lr": 3e-3, "data.augment.mixup": 0, "train.label_smoothing": 0}
    settings |= {"model.embed_dim": 64, "model.num_heads": 2, "model.depth": 3, "model.global_pool": pool}
    settings |= {"model.class_token": str(pool == "token").lower(), "model.qk_norm": "false"}
    settings |= {"model.positions": "learned", "model.drop_path_rate": 0}
    alone = []
    seeds = [{"train.seed": seed} for seed in (1, 2)]
    for overrides in seeds:
        state, _ = build_state_and_run(tmp_path, **(settings | overrides))
        sums = train_epochs(state, make_engine(state, MetricSums.empty(state)), 12)
        alone.append([total / state.steps_per_epoch for total in sums])
    batched = BatchedTraining([build_state_and_run(tmp_path, **(settings | overrides))[0] for overrides in seeds])
    assert batched.first_state.model.blocks[0].attn.kernel == "own"
    losses = torch.stack([batched.train_epoch(epoch).loss for epoch in range(12)], dim=1)
    batched.close()
    assert losses.tolist() == [pytest.approx(single, rel=0.1) for single in alone]
    assert (losses[:, -1] < 0.85 * losses[:, 0]).all()
