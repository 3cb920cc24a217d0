"""open_model(run, fast=True): the same answers, by a way that was measured and checked."""

import json
import time

import pytest
import torch
from torch import nn

from vitascope import ModelConfig, VisionTransformer, open_model
from vitascope.inference import fast
from vitascope.inference.fast import (
    CudaGraphInference,
    build_fastest_feature_function,
    find_or_measure_accuracy_loss_points,
)
from vitascope.model.precision import Int8Linear
from vitascope.run import machine


@pytest.fixture
def int8_wins(monkeypatch) -> None:
    monkeypatch.setattr(fast, "measure_inference_speedup", lambda form, *_: {"int8": 2.0, "bfloat16": 0.0}[form])


def images_for(model: VisionTransformer, count: int = 20) -> torch.Tensor:
    return torch.randn(count, model.config.in_chans, *model.config.image_shape)


@pytest.mark.parametrize("bias", [True, False])
def test_an_int8_layer_is_the_layer_to_a_few_percent(bias) -> None:
    linear, tokens = nn.Linear(64, 48, bias=bias), torch.randn(2, 9, 64)
    linear.weight.data[3] *= 100  # a loud row does not drown the others: each has its own scale
    wanted, result = linear(tokens), Int8Linear(linear)(tokens)
    for row in range(48):
        assert (result - wanted)[..., row].norm() < 0.04 * wanted[..., row].norm()
    assert not torch.equal(result, wanted)


def test_the_largest_products_do_not_overflow_on_this_processor() -> None:
    """Two products of 255 and 127 do not fit into 16 bits, in which processors without VNNI add them."""
    linear = nn.Linear(64, 1, bias=False)
    nn.init.ones_(linear.weight)
    assert Int8Linear(linear)(torch.ones(1, 64)).item() == pytest.approx(64, rel=0.01)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_whole_model_answers_in_int8(pool, int8_wins, unchecked_shapes) -> None:
    model = VisionTransformer(
        ModelConfig(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, global_pool=pool)
    )
    quick, form, gain = build_fastest_feature_function(model.eval())
    assert (form, gain) == ("int8", 2.0)
    pictures = images_for(model)
    with torch.no_grad():
        wanted, result = model.compute_pooled_features(pictures), quick(pictures)
    assert 0 < (result - wanted).norm() < 0.05 * wanted.norm()


def test_what_is_faster_and_as_good_answers_and_the_check_is_kept(run, int8_wins, monkeypatch) -> None:
    monkeypatch.setattr(
        fast, "MAX_ACCURACY_LOSS_POINTS", 3.0
    )  # so small and so briefly trained a model knows little for sure
    model = open_model(run.path, fast=True)
    assert model.fast.description.startswith("int8: matrix products 2.0 times as fast as float32, accuracy loss")
    plain = open_model(run.path)
    pictures = images_for(plain)
    with torch.no_grad():
        assert 0 < (model(pictures) - plain(pictures)).norm() < 0.1 * plain(pictures).norm()
    assert torch.equal(model(pictures), plain(pictures))  # with gradients: the weights themselves answer
    assert abs(model.evaluate("val").accuracy - plain.evaluate("val").accuracy) <= 0.03
    assert json.loads((run.path / "fast.json").read_text())["int8"]["points_lost"] <= 3.0
    monkeypatch.setattr(fast, "try_to_sample_run_images", lambda *_: pytest.fail("looked again"))
    assert open_model(run.path, fast=True).fast.description == model.fast.description
    assert "int8" in model._repr_html_()


def test_what_loses_too_much_or_cannot_be_checked_is_not_used(run, int8_wins, monkeypatch) -> None:
    plain, pictures = open_model(run.path), torch.randn(3, 1, 8, 8)
    cases = (
        (0.3, "float32: int8 would lower the accuracy on the run's images by 0.3 percentage points"),
        (None, "float32: the accuracy of int8 cannot be checked, because the run's images are not available"),
    )
    for lost, words in cases:
        monkeypatch.setattr(fast, "find_or_measure_accuracy_loss_points", lambda *_, lost=lost: lost)
        model = open_model(run.path, fast=True)
        assert model.fast.description.startswith(words)
        with torch.no_grad():
            assert torch.equal(model(pictures), plain(pictures))


def test_points_lost_are_counted_on_the_run_s_own_images(run) -> None:
    model = open_model(run.path)

    def blind(images: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(images), model.config.embed_dim)

    lost = find_or_measure_accuracy_loss_points(model.model, blind, "blind", run, model.info)
    assert 20 < lost < 95  # it always says the same class
    assert json.loads((run.path / "fast.json").read_text())["blind"]["points_lost"] == lost


def test_where_nothing_is_faster_float32_stays(run, monkeypatch) -> None:
    monkeypatch.setattr(fast, "measure_inference_speedup", lambda form, *_: 1.02)
    wanted = "float32: no other format is at least 1.15 times as fast on this machine (best: 1.02 times)"
    assert open_model(run.path, fast=True).fast.description == wanted
    assert not (run.path / "fast.json").exists()


def test_a_format_that_ends_the_process_counts_as_zero(monkeypatch) -> None:
    monkeypatch.setattr(machine.sys, "executable", "/bin/false")
    assert machine._measure_speedup_in_subprocess("bfloat16", "train") == 0.0


def test_the_probe_measures_int8_here() -> None:
    assert 0.05 < machine._measure_speedup_in_subprocess("int8", "answer", "64", "1") < 50


@pytest.mark.parametrize(("hopeless", "rounds"), [(0, 2), (1e9, machine.NUM_ROUNDS)])
def test_the_probe_stops_early_where_a_format_is_hopeless(monkeypatch, hopeless, rounds) -> None:
    """A CPU without bfloat16 instructions takes seconds a round."""
    looks, real = [], time.perf_counter
    monkeypatch.setattr(machine, "MAX_SLOWDOWN", hopeless)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: looks.append(1) or real())
    assert machine._measure_linear_layer_speedup("int8", "answer", 16, 1) > 0 and len(looks) == 4 * rounds


class ByHand(CudaGraphInference):
    """Instead of a graph, the model itself on the static batch."""

    def _capture_and_store_feature_graph(self, size, like):
        inputs, output = torch.zeros(size, *like.shape[1:]), torch.zeros(size, self.model.config.embed_dim)

        class Graph:
            @staticmethod
            def replay() -> None:
                output.copy_(self.model.float().compute_pooled_features(inputs))

        self.captured_graphs[size] = Graph(), inputs, output
        return self.captured_graphs[size]


@pytest.mark.parametrize(("count", "used"), [(1, {1}), (5, {32}), (40, {50}), (101, {50, 1})])
def test_any_number_of_images_goes_through_static_batches(count, used) -> None:
    model = VisionTransformer(ModelConfig(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2)).eval()
    pictures = images_for(model, count)
    recorded = ByHand(model, full_batch_size=50)
    with torch.no_grad():
        torch.testing.assert_close(recorded(pictures), model.float().compute_pooled_features(pictures))
    assert set(recorded.captured_graphs) == used
