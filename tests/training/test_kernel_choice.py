"""The kernels a model runs with: the least measured time wins, once per shape, and what does not work never wins."""

import pytest
import torch

from tests.training.test_captured import losses_of
from tests.training.test_runs import session_of
from tests.training.tiny import EVERYTHING
from vitascope import ModelConfig, VisionTransformer, load
from vitascope.model.attention import SelfAttention
from vitascope.training import kernels
from vitascope.training.kernels import Use, choose_kernels, use_kernels

CONFIG = ModelConfig(
    img_size=32, patch_size=4, embed_dim=128, depth=2, num_heads=2, num_classes=10,
    class_token=False, global_pool="avg", positions="learned+rotary", qk_norm=True, norm="rmsnorm", mlp="relu2",
)  # fmt: skip
USE = Use(4, torch.bfloat16, training=True, compiled=False)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A stopwatch that says what it is told to, and counts; the memory in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    times = {"default": 3.0, "own": 1.0, "cudnn": 2.0, "flash": 4.0, "efficient": 5.0, "math": 6.0}
    asked = []

    def measure(module, kernel, *_):
        asked.append(kernel)
        return times[kernel]

    monkeypatch.setattr(kernels, "_milliseconds", measure)
    return times, asked


def test_the_fastest_is_chosen_once_per_shape_and_remembered(quick) -> None:
    times, asked = quick
    attention, tokens = SelfAttention(64, 2), torch.zeros(4, 16, 64)
    assert kernels._fastest(attention, tokens, (None, None), USE) == "own"
    assert sorted(asked) == sorted(times)
    times["own"] = 9.0
    assert kernels._fastest(attention, tokens, (None, None), USE) == "own" and len(asked) == len(times)
    assert kernels._fastest(attention, tokens[:, :8], (None, None), USE) == "cudnn"  # another shape
    assert kernels._fastest(SelfAttention(64, 2, qk_norm=True), tokens, (None, None), USE) == "cudnn"
    assert len(kernels.read_memory()) == 3


def test_a_torn_or_foreign_memory_is_measured_again(quick) -> None:
    attention, tokens = SelfAttention(64, 2), torch.zeros(4, 16, 64)
    kernels._fastest(attention, tokens, (None, None), USE)
    for content in ("{", "[]", '{"x": 1}'):
        kernels._file().write_text(content, encoding="utf-8")
        assert kernels._fastest(attention, tokens, (None, None), USE) == "own"
    kernels.write_memory(dict.fromkeys(kernels.read_memory(), "of a later version"))
    assert kernels._fastest(attention, tokens, (None, None), USE) == "own"


def test_a_kernel_that_fails_takes_forever(monkeypatch) -> None:
    def broken(work):
        work()
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "recorded_milliseconds", broken)
    plain = Use(2, torch.float32, training=True, compiled=False)
    assert kernels._milliseconds(SelfAttention(64, 2), "default", torch.zeros(2, 4, 64), (), plain) == float("inf")


def test_what_is_measured_is_a_step_forward_and_back_of_a_copy(monkeypatch) -> None:
    attention, seen = SelfAttention(64, 2), []
    monkeypatch.setattr(kernels, "recorded_milliseconds", lambda work: seen.append(work()) or 1.0)
    for training in (True, False):
        use = Use(2, torch.float32, training=training, compiled=False)
        assert kernels._milliseconds(attention, "math", torch.zeros(2, 4, 64), (), use) == 1.0
    assert attention.kernel == "default" and all(weight.grad is None for weight in attention.parameters())


def test_on_a_cpu_pytorch_s_own_are_used() -> None:
    assert choose_kernels(VisionTransformer(CONFIG), USE) == {}


def test_kernels_are_set_in_every_block_and_norm() -> None:
    model = VisionTransformer(CONFIG)
    use_kernels(model, {"attention": "own", "mlp": "fused", "norm": "fused"})
    for block in model.blocks:
        assert (block.attn.kernel, block.mlp.kernel, block.norm2.kernel) == ("own", "fused", "fused")
    assert model.fc_norm.kernel == "fused"
    use_kernels(model, {})
    assert model.blocks[1].attn.kernel == model.blocks[1].mlp.kernel == model.fc_norm.kernel == "default"


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
def test_the_whole_model_is_the_same_with_its_kernels(unchecked_shapes) -> None:
    model, images = VisionTransformer(CONFIG).cuda().train(), torch.randn(64, 3, 32, 32, device="cuda")
    chosen = choose_kernels(model, USE)
    assert set(chosen) == {"attention", "mlp", "norm"}
    answers = {}
    for name, use in (("plain", {}), ("kernels", {"attention": "own", "mlp": "fused", "norm": "fused"})):
        use_kernels(model, use)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).float().logsumexp(1).square().mean()
        answers[name] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    for found, wanted in zip(answers["kernels"], answers["plain"], strict=True):
        assert (found - wanted).norm() < 0.03 * wanted.norm() + 1e-6


@on_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_recorded_step_on_a_gpu_learns_what_the_plain_one_learns(
    tmp_path, precision, unchecked_shapes, monkeypatch
) -> None:
    from vitascope.training import muon
    from vitascope.training.feeding import EpochLoader
    from vitascope.training.step import Tally

    monkeypatch.setattr(muon, "ON_GPU", torch.float32)  # in bfloat16 the last digit of a weight decides on some updates
    found = {}
    for name, capture in (("plain", "never"), ("recorded", "always")):
        quiet = {"model.drop_path_rate": 0, "model.proj_drop_rate": 0, "train.device": "cuda"}
        quiet["model.qkv_bias"] = "false"  # a key's bias changes nothing: its gradient is rounding, which Adam enlarges
        how = {"train.precision": precision, "train.capture": capture}
        session, _ = session_of(tmp_path, **(EVERYTHING | quiet | how))
        loader, tally = EpochLoader(session), Tally.empty(session)
        session.model.train()
        before = {key: weight.detach().clone() for key, weight in session.model.named_parameters()}
        losses = losses_of(session, loader, tally, 2)
        found[name] = (losses, {key: weight.detach() - before[key] for key, weight in session.model.named_parameters()})
    assert found["recorded"][0] == pytest.approx(found["plain"][0], rel=1e-4 if precision == "float32" else 1e-2)
    if precision == "float32":
        for key, way in found["plain"][1].items():  # of the way each weight went, not of the weight
            apart = (found["recorded"][1][key] - way).norm() / way.norm()
            assert apart < 0.03, (key, apart)


@on_gpu
def test_fast_answers_on_a_gpu_are_the_model_s(tmp_path, unchecked_shapes) -> None:
    from tests.training.tiny import tiny_run

    run = tiny_run(tmp_path, **{"train.device": "cuda", "train.epochs": 3})
    plain, fast = load(run.path, device="cuda"), load(run.path, device="cuda", fast=True)
    images = torch.randn(70, plain.config.in_chans, *plain.config.image_shape, device="cuda")
    with torch.inference_mode():
        wanted, found = plain(images), fast(images)
        assert (found - wanted).norm() < 0.03 * wanted.norm()
        assert (fast(images[:1]) - wanted[:1]).norm() < 0.03 * wanted[:1].norm()
        assert (fast(images[:5]) - wanted[:5]).norm() < 0.03 * wanted[:5].norm()


@on_gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"train.small_size": 4}, {"model.grad_checkpointing": "true"}, {"train.objective": "mae", "mae.pictures": 0}],
)
def test_a_recorded_run_goes_on_after_a_stop(tmp_path, settings, unchecked_shapes) -> None:
    """On the device, with stochastic depth where blocks are not computed twice."""
    from tests.training.test_runs import check_goes_on_after_a_stop

    chance = {} if "model.grad_checkpointing" in settings else {"model.drop_path_rate": 0.2}
    settings = {"train.device": "cuda", "train.capture": "always", "train.epochs": 4} | chance | settings
    check_goes_on_after_a_stop(tmp_path, **settings)
