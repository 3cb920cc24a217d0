"""An exported file answers as the model does, whatever the model is made of; one that does not is never written."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from tests.model.combinations import TINY
from tests.slow import slow_except
from vitascope import ModelConfig, UserError, VisionTransformer, open_model
from vitascope.data import open_data
from vitascope.data.preprocessing import Preprocessing
from vitascope.explain import attention_maps
from vitascope.export import export_run, formats, int8, verify, write_int8, write_onnx, write_torch
from vitascope.export.formats import TransformerWithMaps, copy_model_for_export
from vitascope.run.images import load_run_split_if_any, try_to_sample_run_images
from vitascope.weights.model_info import ModelInfo

KINDS = {
    "class token": {},
    "mean, causal, not square": {
        "img_size": (4, 12),
        "patch_size": (4, 2),
        "in_chans": 1,
        "class_token": False,
        "global_pool": "avg",
        "positions": "learned+rotary",
        "qk_norm": True,
        "norm": "rmsnorm",
        "mlp": "relu2",
        "causal": True,
        "depth": 1,
    },
    "sequence pooling, registers, no biases": {
        "img_size": (12, 8),
        "global_pool": "seq",
        "reg_tokens": 2,
        "no_embed_class": True,
        "positions": "sincos2d+rotary",
        "mlp": "swiglu",
        "qk_norm": True,
        "init_values": None,
        "qkv_bias": False,
        "proj_bias": False,
        "depth": 1,
    },
    "sheet A": {
        "norm": "none",
        "output_projection": False,
        "positions": "sinusoidal",
        "num_classes": 0,
        "initialize": "torch",
        "class_token": False,
        "global_pool": "avg",
    },
    "class token, registers, rotary, rates": {
        "positions": "rotary",
        "reg_tokens": 1,
        "norm": "rmsnorm",
        "qk_norm": True,
        "grad_checkpointing": True,
        "depth": 1,
        **dict.fromkeys(("drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate", "pos_drop_rate"), 0.1),
    },
    "convolutions": {"tokenizer": "conv", "patch_size": 2, "global_pool": "seq", "class_token": False, "depth": 1},
    "shifted patches that do not look at themselves": {"tokenizer": "spt", "attention": "lsa", "depth": 1},
    "one patch, one block, one head": {
        "img_size": 4,
        "positions": "none",
        "class_token": False,
        "global_pool": "seq",
        "depth": 1,
        "num_heads": 1,
    },
}


def loud(config: ModelConfig) -> VisionTransformer:
    """Weights so large that every part matters."""
    model = VisionTransformer(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def facts_of(config: ModelConfig) -> ModelInfo:
    classes, stored = [f"class {n}" for n in range(config.num_classes)], (config.in_chans, *config.image_shape)
    halves = (0.5,) * config.in_chans
    return ModelInfo(config, classes, Preprocessing(config.image_shape, halves, halves), stored)


def images_for(config: ModelConfig, count: int) -> torch.Tensor:
    return torch.randn(count, config.in_chans, *config.image_shape)


def answers_of(path, images) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(answer) for answer in session.run(None, {"images": images.numpy()})]


@pytest.mark.parametrize("kind", slow_except(KINDS, ["class token"]))
def test_every_kind_of_model_is_exported_faithfully(kind, tmp_path) -> None:
    model = loud(replace(TINY, **KINDS[kind]))
    facts, pictures = facts_of(model.config), images_for(model.config, 5)
    written = write_onnx(model, facts, tmp_path / "model.onnx")
    assert written.differences["logits"] < 1e-5 and written.compared_on == "random"
    write_torch(model, facts, tmp_path / "model.pt2")
    module = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        wanted, exported = model(pictures), module(pictures)
    close = {"atol": 1e-5 * wanted.abs().max().item(), "rtol": 0}
    torch.testing.assert_close(exported, wanted, **close)
    torch.testing.assert_close(answers_of(tmp_path / "model.onnx", pictures)[0], wanted, **close)


MAPPED = [list(KINDS)[number] for number in (1, 2, -2)]


@pytest.mark.parametrize("setting", ["merge_tokens", "drop_tokens"])
def test_choices_that_hang_on_a_rounding_are_not_exported(setting, tmp_path) -> None:
    model = VisionTransformer(replace(TINY, **{setting: 1})).eval()
    with pytest.raises(UserError, match="with all tokens"):
        write_onnx(model, facts_of(model.config), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", slow_except(MAPPED, MAPPED[:1]))
def test_the_maps_of_different_kinds_are_the_model_s(kind, tmp_path) -> None:
    model = loud(replace(TINY, **KINDS[kind]))
    pictures = images_for(model.config, 5)
    write_onnx(model, facts_of(model.config), tmp_path / "model.onnx", maps=True)
    with torch.no_grad():
        wanted = model(pictures)
    logits, maps = answers_of(tmp_path / "model.onnx", pictures)
    torch.testing.assert_close(logits, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0)
    torch.testing.assert_close(maps, torch.stack(attention_maps(model, pictures), dim=1), atol=1e-5, rtol=0)


def test_a_run_s_file_answers_for_batches_it_was_not_traced_with(run, tmp_path) -> None:
    model, path = open_model(run), tmp_path / "model.onnx"
    held = try_to_sample_run_images(run, model.info, 50)
    written = write_onnx(model.model, model.info, path, run_name="digits/mine", maps=True, run_sample=held)
    assert written.compared_on == "validation" and set(written.differences) == {"logits", "maps"}
    images = model.info.preparation(held[0].images)
    for count in (1, 3, 50):
        logits, maps = answers_of(path, images[:count])
        with torch.no_grad():
            torch.testing.assert_close(logits, model(images[:count]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(maps, torch.stack(attention_maps(model.model, images[:count]), 1), atol=1e-6, rtol=0)


def test_the_file_is_one_and_says_what_its_user_must_know_and_nothing_of_this_machine(run, tmp_path) -> None:
    model = open_model(run)
    write_onnx(model.model, model.info, tmp_path / "model.onnx", run_name="digits/mine", opset=18)
    write_torch(model.model, model.info, tmp_path / "model.pt2", run_name="digits/mine")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.pt2"]
    whole = onnx.load(tmp_path / "model.onnx")
    metadata, extra = {entry.key: entry.value for entry in whole.metadata_props}, {"vitascope.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert json.loads(extra["vitascope.json"]) == metadata
    assert json.loads(metadata["classes"]) == model.classes and json.loads(metadata["img_size"]) == [8, 8]
    assert metadata["temperature"] == repr(model.info.temperature)
    assert json.loads(metadata["mean"]) == list(model.info.preparation.mean)
    assert (metadata["run"], metadata["in_chans"]) == ("digits/mine", "1") and "divide by 255" in metadata[
        "preparation"
    ]
    assert whole.opset_import[0].version == 18 and whole.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        assert b"vit.py" not in content and str(tmp_path).encode() not in content


def test_int8_tells_what_it_costs_and_never_sees_test_images(run, tmp_path, monkeypatch) -> None:
    opened, real = [], open_data.open_data_by_name_or_path

    def spied(*words, **more):
        source = real(*words, **more)
        return replace(source, load_split=lambda split: opened.append(split) or source.load_split(split))

    monkeypatch.setattr(open_data, "open_data_by_name_or_path", spied)
    model = open_model(run)
    written = export_run(model, "int8", tmp_path / "short.onnx")
    assert opened and "test" not in opened
    held, comparison = load_run_split_if_any(run, model.info, "val"), written.int8
    parts = model.info.preparation(held.images).split(int8.BATCH_SIZE)  # scales may depend on who is asked together
    logits = torch.cat([answers_of(tmp_path / "short.onnx", part)[0] for part in parts]).argmax(1)
    with torch.no_grad():
        float32 = model(model.info.preparation(held.images)).argmax(1)
    assert (comparison.accuracy.images, comparison.accuracy.which) == (len(held), "validation")
    assert comparison.accuracy.int8 == pytest.approx((logits == held.labels).float().mean().item())
    assert comparison.accuracy.float32 == pytest.approx((float32 == held.labels).float().mean().item())
    assert comparison.accuracy.agreement == pytest.approx((logits == float32).float().mean().item())
    assert 1e-4 < written.differences["logits"] < 0.2
    assert any("Integer" in node.op_type or "Quantize" in node.op_type for node in _nodes(tmp_path / "short.onnx"))
    assert {timing.batch for timing in written.speed} == {1, 64}


def test_the_way_to_int8_that_answers_better_on_training_images_is_taken(run, tmp_path, monkeypatch) -> None:
    model = open_model(run)
    training, preparation = load_run_split_if_any(run, model.info, "train"), model.info.preparation
    formats.trace_and_save_onnx(model.model, tmp_path / "model.onnx", {}, maps=False, opset=20)

    def ruined(whole, calibration):
        return _spoilt(whole, whole.with_name("ruined.onnx"), -1.0)

    for worse, better in (("dynamic", "static"), ("static", "dynamic")):
        with monkeypatch.context() as patch:
            patch.setitem(int8.QUANTISERS, worse, ruined)
            assert int8.quantise_by_most_accurate_method(tmp_path / "model.onnx", preparation, training)[1] == better
    assert int8.quantise_by_most_accurate_method(tmp_path / "model.onnx", preparation, None)[1] == "dynamic"


def test_a_file_with_other_weights_is_refused_and_what_was_there_stays(run, tmp_path, monkeypatch) -> None:
    model, path = open_model(run), tmp_path / "model.onnx"
    path.write_text("an older file")
    formats.trace_and_save_onnx(model.model, tmp_path / "sabotaged", {}, maps=False, opset=20)
    content = _spoilt(tmp_path / "sabotaged", tmp_path / "sabotaged", 1.001).read_bytes()
    (tmp_path / "sabotaged").unlink()

    def sabotaged(model, file, words, **how):
        file.write_bytes(content)

    for module, write in ((formats, write_onnx), (int8, write_int8)):
        monkeypatch.setattr(module, "trace_and_save_onnx", sabotaged)
        with pytest.raises(UserError, match=r"differ from the PyTorch model's by .* No file was written"):
            write(model.model, model.info, path)
    assert path.read_text() == "an older file" and list(tmp_path.iterdir()) == [path]


def test_a_torch_file_with_other_weights_is_refused(run, tmp_path, monkeypatch) -> None:
    def sabotaged(model):
        twin = copy_model_for_export(model)
        twin.head.weight *= 1.0001
        return twin

    monkeypatch.setattr(formats, "copy_model_for_export", sabotaged)
    model = open_model(run)
    with pytest.raises(UserError, match=r"allowed: 1e-05\)\. No file was written"):
        write_torch(model.model, model.info, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_maps_that_are_not_the_model_s_are_refused(tmp_path, monkeypatch) -> None:
    real = TransformerWithMaps.forward

    def turned(self, images):
        logits, maps = real(self, images)
        return logits, maps.flip(1)

    monkeypatch.setattr(TransformerWithMaps, "forward", turned)
    with pytest.raises(UserError, match="The exported maps differ"):
        write_onnx(loud(TINY), facts_of(TINY), tmp_path / "model.onnx", maps=True)
    assert not list(tmp_path.iterdir())


def test_a_file_that_says_nothing_at_all_is_refused() -> None:
    model, pictures = loud(TINY), images_for(TINY, 10)
    for answer in (torch.full((1, 3), float("nan")), torch.zeros(1, 4)):
        apart = verify.compute_max_relative_error_per_output(
            model, lambda images, outputs=answer: [outputs.expand(len(images), -1)], pictures
        )
        with pytest.raises(UserError, match="The exported logits differ"):
            verify.raise_if_export_inaccurate(apart, 1e-4)


def test_few_images_fill_the_batches_and_a_training_model_is_refused(run, tmp_path) -> None:
    model = open_model(run)
    run_sample = try_to_sample_run_images(run, model.info, 3)
    images, description = verify.select_run_or_random_images(model.model, model.info.preparation, run_sample)
    assert len(images) == 10 and description == run_sample.description and torch.equal(images[3], images[0])
    with pytest.raises(UserError, match=r"training mode.*model\.eval\(\)"):
        write_onnx(model.model.train(), model.info, tmp_path / "model.onnx")


def test_weights_too_large_for_an_onnx_file_are_refused_before_any_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(formats, "MAX_FILE_BYTES", 1000)
    with pytest.raises(UserError, match=r"an ONNX file can hold 2 GiB\. Use: vitascope export torch"):
        write_onnx(loud(TINY), facts_of(TINY), tmp_path / "model.onnx")


def _nodes(path):
    return onnx.load(path).graph.node


def _spoilt(file, out, factor: float):
    """The same file with the head's weights multiplied."""
    whole = onnx.load(file)
    weight = next(tensor for tensor in whole.graph.initializer if tensor.name == "head.weight")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(factor), weight.name))
    onnx.save(whole, out)
    return out
