"""The kernels a model runs with: the least measured time wins, once per shape, and what does not work never wins."""

import json
from dataclasses import replace

import pytest
import torch

from tests.training.test_captured import train_epochs
from tests.training.test_runs import build_state_and_run
from tests.training.tiny import EVERYTHING
from vitascope import ModelConfig, VisionTransformer, load
from vitascope.inference import kernel_choice as kernel_choices
from vitascope.inference import kernel_choice as kernels
from vitascope.inference.kernel_choice import (
    KernelKey,
    KernelWorkload,
    LayerCall,
    choose_fastest_kernels,
    make_kernel_key,
    set_kernels,
)
from vitascope.model.attention import SelfAttention
from vitascope.model.norm import RMSNorm
from vitascope.run.files import write_json

CONFIG = ModelConfig(
    img_size=32, patch_size=4, embed_dim=128, depth=2, num_heads=2, num_classes=10,
    class_token=False, global_pool="avg", positions="learned+rotary", qk_norm=True, norm="rmsnorm", mlp="relu2",
)  # fmt: skip
USE = KernelWorkload(4, torch.bfloat16, training=True, compiled=False)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A stopwatch that says what it is told to, and counts; memory and shipped table in a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choices, "SHIPPED_TABLE_PATH", tmp_path / "shipped.json")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    times = {"default": 3.0, "own": 1.0, "cudnn": 2.0, "flash": 4.0, "efficient": 5.0, "math": 6.0, "fused": 2.5}
    asked = []

    def measure(part, kernel, use):
        asked.append(kernel)
        return times[kernel]

    monkeypatch.setattr(kernels, "_measure_kernel_milliseconds_or_inf", measure)
    return times, asked


def attention_part(tokens: int = 16, **settings) -> LayerCall:
    return LayerCall(SelfAttention(64, 2, **settings), torch.zeros(4, tokens, 64), (None, None))


def test_the_fastest_is_chosen_once_per_shape_and_remembered(quick) -> None:
    times, asked = quick
    part = attention_part()
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "own"
    assert sorted(asked) == sorted(part.module.KERNELS)
    times["own"] = 9.0
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "own" and len(asked) == len(part.module.KERNELS)
    assert kernels._find_or_measure_fastest_kernel(attention_part(tokens=8), USE) == "cudnn"  # another shape
    assert kernels._find_or_measure_fastest_kernel(attention_part(qk_norm=True), USE) == "cudnn"
    assert len(kernel_choices.read_local_kernel_table()) == 3


def test_a_torn_or_foreign_memory_is_measured_again(quick) -> None:
    part = attention_part()
    kernels._find_or_measure_fastest_kernel(part, USE)
    for content in ("{", "[]", '{"x": 1}'):
        kernel_choices.get_local_table_path().write_text(content, encoding="utf-8")
        assert kernels._find_or_measure_fastest_kernel(part, USE) == "own"
    write_json(
        kernel_choices.get_local_table_path(),
        dict.fromkeys(kernel_choices.read_local_kernel_table(), "of a later version"),
    )
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "own"


def test_a_key_s_text_tells_everything_the_measurement_depends_on(quick) -> None:
    keys = [
        make_kernel_key(part, replace(USE, training=training))
        for part in (
            attention_part(),
            attention_part(qk_norm=True),
            attention_part(causal=True),
            LayerCall(SelfAttention(64, 2), torch.zeros(4, 16, 64), (None, torch.zeros(2, 16, 16))),
            LayerCall(VisionTransformer(CONFIG).blocks[0].mlp, torch.zeros(4, 16, 64)),
            LayerCall(RMSNorm(64), torch.zeros(3, 64)),
        )
        for training in (True, False)
    ]
    for key in keys:
        assert KernelKey.parse(str(key)) == key
    assert len({str(key) for key in keys}) == len(keys)
    named = make_kernel_key(attention_part(), USE)
    wanted = (
        f"a GPU, torch {torch.__version__}: SelfAttention of 2 heads, Identity(), 4×16×64, torch.bfloat16, training, "
    )
    assert str(named) == f"{wanted}of {'/'.join(SelfAttention.KERNELS)}"  # earlier versions' caches stay valid
    assert KernelKey.parse("something else") is None


def test_a_shipped_choice_is_taken_without_measuring_and_one_s_own_before_it(quick) -> None:
    _, asked = quick
    part = attention_part()
    key = make_kernel_key(part, USE)
    write_json(kernel_choices.SHIPPED_TABLE_PATH, {str(key): "math"})
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "math" and not asked
    assert not kernel_choices.get_local_table_path().exists()
    kernel_choices.try_store_fastest_kernel(key, "efficient")
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "efficient" and not asked


def test_another_torch_version_s_choice_is_taken_the_newest_first_and_no_other_gpu_s_or_shape_s(quick) -> None:
    _, asked = quick
    part = attention_part()
    key = make_kernel_key(part, USE)
    others = {
        "flash": replace(key, torch_version="2.9.1"),
        "cudnn": replace(key, torch_version="2.10.0+cu130"),
        "math": replace(key, torch_version="2.10.0+cu130", gpu="another GPU"),
        "own": replace(key, torch_version="2.12.0", shape=(4, 17, 64)),
        "default": replace(key, torch_version="2.12.0", task="inference"),
        "efficient": replace(key, torch_version="2.12.0", kernels=("default", "efficient")),
    }
    write_json(
        kernel_choices.SHIPPED_TABLE_PATH, {str(other): name for name, other in others.items()} | {"no key": "math"}
    )
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "cudnn" and not asked
    write_json(kernel_choices.SHIPPED_TABLE_PATH, {str(key): "flash", str(others["cudnn"]): "cudnn"})
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "flash" and not asked
    write_json(kernel_choices.SHIPPED_TABLE_PATH, {str(key): "of a later version"})
    assert kernels._find_or_measure_fastest_kernel(part, USE) == "own" and asked


def test_the_table_that_ships_can_be_read_and_is_sorted() -> None:
    text = kernel_choices.SHIPPED_TABLE_PATH.read_text(encoding="utf-8")
    table = json.loads(text)
    assert list(table) == sorted(table)
    for key, name in table.items():
        parsed = KernelKey.parse(key)
        assert parsed is not None and name in parsed.kernels


def test_measuring_leaves_the_random_state(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_measure_kernel_milliseconds_or_inf", lambda *_: torch.rand(()).item())
    part, before = attention_part(), torch.get_rng_state()
    kernels.measure_fastest_kernel(part, USE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_that_fails_takes_forever(monkeypatch) -> None:
    def broken(work):
        work()
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "measure_milliseconds_in_cuda_graph", broken)
    plain = KernelWorkload(2, torch.float32, training=True, compiled=False)
    assert kernels._measure_kernel_milliseconds_or_inf(attention_part(), "default", plain) == float("inf")


def test_what_is_measured_is_a_step_forward_and_back_of_a_copy(monkeypatch) -> None:
    part, seen = attention_part(), []
    monkeypatch.setattr(kernels, "measure_milliseconds_in_cuda_graph", lambda work: seen.append(work()) or 1.0)
    for training in (True, False):
        use = KernelWorkload(2, torch.float32, training=training, compiled=False)
        assert kernels._measure_kernel_milliseconds_or_inf(part, "math", use) == 1.0
    assert part.module.kernel == "default" and all(weight.grad is None for weight in part.module.parameters())


def test_on_a_cpu_pytorch_s_own_are_used() -> None:
    assert choose_fastest_kernels(VisionTransformer(CONFIG), USE) == {}


def test_kernels_are_set_in_every_block_and_norm() -> None:
    model = VisionTransformer(CONFIG)
    set_kernels(model, {"attention": "own", "mlp": "fused", "norm": "fused"})
    for block in model.blocks:
        assert (block.attn.kernel, block.mlp.kernel, block.norm2.kernel) == ("own", "fused", "fused")
    assert model.fc_norm.kernel == "fused"
    set_kernels(model, {})
    assert model.blocks[1].attn.kernel == model.blocks[1].mlp.kernel == model.fc_norm.kernel == "default"


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
def test_the_whole_model_is_the_same_with_its_kernels(unchecked_shapes) -> None:
    model, images = VisionTransformer(CONFIG).cuda().train(), torch.randn(64, 3, 32, 32, device="cuda")
    chosen = choose_fastest_kernels(model, USE)
    assert set(chosen) == {"attention", "mlp", "norm"}
    answers = {}
    for name, use in (("plain", {}), ("kernels", {"attention": "own", "mlp": "fused", "norm": "fused"})):
        set_kernels(model, use)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).float().logsumexp(1).square().mean()
        answers[name] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    for result, wanted in zip(answers["kernels"], answers["plain"], strict=True):
        assert (result - wanted).norm() < 0.03 * wanted.norm() + 1e-6


@on_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_recorded_step_on_a_gpu_learns_what_the_plain_one_learns(
    tmp_path, precision, unchecked_shapes, monkeypatch
) -> None:
    from vitascope.training.engines.single_run import make_engine
    from vitascope.training.optim import muon
    from vitascope.training.step import MetricSums

    monkeypatch.setattr(
        muon, "GPU_DTYPE", torch.float32
    )  # in bfloat16 the last digit of a weight decides on some updates
    result = {}
    for name, capture in (("plain", "never"), ("recorded", "always")):
        quiet = {"model.drop_path_rate": 0, "model.proj_drop_rate": 0, "train.device": "cuda"}
        quiet["model.qkv_bias"] = "false"  # a key's bias changes nothing: its gradient is rounding, which Adam enlarges
        how = {"train.precision": precision, "train.cuda_graph": capture}
        state, _ = build_state_and_run(tmp_path, **(EVERYTHING | quiet | how))
        state.model.train()
        before = {key: weight.detach().clone() for key, weight in state.model.named_parameters()}
        losses = train_epochs(state, make_engine(state, MetricSums.empty(state)), 2)
        result[name] = (losses, {key: weight.detach() - before[key] for key, weight in state.model.named_parameters()})
    assert result["recorded"][0] == pytest.approx(result["plain"][0], rel=1e-4 if precision == "float32" else 1e-2)
    if precision == "float32":
        for key, way in result["plain"][1].items():  # of the way each weight went, not of the weight
            apart = (result["recorded"][1][key] - way).norm() / way.norm()
            assert apart < 0.03, (key, apart)


@on_gpu
def test_fast_answers_on_a_gpu_are_the_model_s(tmp_path, unchecked_shapes) -> None:
    from tests.training.tiny import tiny_run

    run = tiny_run(tmp_path, **{"train.device": "cuda", "train.epochs": 3})
    plain, fast = load(run.path, device="cuda"), load(run.path, device="cuda", fast=True)
    images = torch.randn(70, plain.config.in_chans, *plain.config.image_shape, device="cuda")
    with torch.inference_mode():
        wanted, result = plain(images), fast(images)
        assert (result - wanted).norm() < 0.03 * wanted.norm()
        assert (fast(images[:1]) - wanted[:1]).norm() < 0.03 * wanted[:1].norm()
        assert (fast(images[:5]) - wanted[:5]).norm() < 0.03 * wanted[:5].norm()


@on_gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train.patch_share": 0.5},
        {"model.grad_checkpointing": "true"},
        {"train.objective": "mae", "mae.pictures": 0},
    ],
)
def test_a_recorded_run_goes_on_after_a_stop(tmp_path, settings, unchecked_shapes) -> None:
    """On the device, with stochastic depth where blocks are not computed twice."""
    from tests.training.test_runs import check_goes_on_after_a_stop

    chance = {} if "model.grad_checkpointing" in settings else {"model.drop_path_rate": 0.2}
    settings = {"train.device": "cuda", "train.cuda_graph": "always", "train.epochs": 4} | chance | settings
    check_goes_on_after_a_stop(tmp_path, **settings)
