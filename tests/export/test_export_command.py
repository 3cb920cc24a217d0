"""`vitascope export` as a user meets it: a run, the files beside it, wrong words."""

import json
import re
import shutil
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from vitascope import ModelConfig, UserError, VisionTransformer, open_model
from vitascope.cli.export import _format_times_and_speedups
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.export import verify, write_onnx
from vitascope.export.formats import load_onnx_as_function
from vitascope.export.verify import Timing, time_candidates_with_one_thread

TINY = ModelConfig(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1, num_classes=3)
DOCS = Path(__file__).parents[2] / "docs" / "export.md"


def test_onnx_is_written_to_the_run_and_reported_in_a_table(vitascope, run) -> None:
    answer = vitascope("export", "onnx", str(run.path), "--maps")
    assert answer.code == 0 and answer.err == ""
    path = run.path / "export" / "model.onnx"
    for words in (
        str(path),
        "0.0",
        "verified, largest difference from PyTorch",
        "× their largest value",
        "logits ",
        "maps ",
        "validation images",
        "64 images",
        "onnxruntime",
    ):
        assert words in answer.out
    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == ["logits", "maps"]
    assert session.get_outputs()[1].shape == ["batch", 2, 2, 16, 16]
    assert session.get_modelmeta().custom_metadata_map["run"] == f"digits/{run.path.name}"


def test_the_speed_up_is_the_quotient_of_the_printed_times() -> None:
    quick = _format_times_and_speedups(Timing(1, {"torch": 6.8, "onnxruntime": 4.14}, {"onnxruntime": 6.8 / 4.14}))
    assert quick == "torch 6.8 ms; onnxruntime 4.14 ms (1.64 times as fast as torch)"
    slow = _format_times_and_speedups(Timing(1, {"torch": 0.5, "onnxruntime": 1.0}, {"onnxruntime": 0.5}))
    assert slow == "torch 500 µs; onnxruntime 1 ms (2.00 times as slow as torch)"
    for ratio, text in ((1.0, "as fast as torch"), (1 / 1.06, "6 % slower than torch"), (1.03, "1.03 times as fast")):
        assert f"({text}" in _format_times_and_speedups(Timing(1, {"torch": 1.0, "ort": 1 / ratio}, {"ort": ratio}))
    timings = time_candidates_with_one_thread(VisionTransformer(TINY).eval(), {"again": lambda images: images + 1})
    for timing in timings:
        assert timing.times_as_fast == {"again": timing.milliseconds["torch"] / timing.milliseconds["again"]}


def test_the_lines_in_the_docs_answer_as_predict_does(vitascope, run, tmp_path, monkeypatch, capsys) -> None:
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[1]
    picture = open_builtin_digits().load_split("train").images[3, 0].repeat_interleave(3, 0).repeat_interleave(5, 1)
    Image.fromarray(picture.numpy()).save(tmp_path / "photo.png")
    model = open_model(run)
    write_onnx(model.model, model.info, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    known: dict = {}
    exec(code, known)
    wanted = model.predict("photo.png")[0]
    label, probability = capsys.readouterr().out.strip().rsplit(" ", 1)
    assert label == wanted.label and float(probability) == pytest.approx(wanted.probability, abs=1e-5)
    chances = torch.from_numpy(known["logits"]).softmax(0)
    assert chances.max().item() == pytest.approx(wanted.probability, abs=1e-5)


def test_int8_prints_only_json_with_the_option(vitascope, run, tmp_path) -> None:
    out = tmp_path / "new" / "short.onnx"
    answer = vitascope("export", "onnx", str(run.path), "--int8", "--json", "--out", str(out))
    report = json.loads(answer.out)
    assert answer.code == 0 and answer.err == "" and report["path"] == str(out)
    assert report["bytes"] == out.stat().st_size and report["int8"]["method"] in ("dynamic", "static")
    assert 0 <= report["int8"]["accuracy"]["int8"] <= 1 and report["int8"]["accuracy"]["which"] == "validation"
    assert set(report["speed"][0]["times_as_fast"]) == {"onnxruntime", "onnxruntime, int8"}


def test_a_run_without_its_data_is_compared_on_random_images(vitascope, run, tmp_path) -> None:
    moved = tmp_path / run.path.name
    shutil.copytree(run.path, moved)
    recipe = moved / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: digits", "name: nowhere"))
    answer = vitascope("export", "onnx", str(moved), "--int8")
    assert answer.code == 0, answer.err
    assert "on random images" in answer.out and "the run's images are not available" in answer.out
    assert "int8 (dynamic)" in answer.out and (moved / "export" / "model-int8.onnx").is_file()


def test_torch_writes_a_pt2_file(vitascope, run) -> None:
    answer = vitascope("export", "torch", str(run.path))
    assert answer.code == 0 and answer.err == "" and "torch.export" in answer.out
    assert (run.path / "export" / "model.pt2").is_file()


def test_weights_from_outside_are_exported_under_their_own_name(vitascope, tmp_path, monkeypatch) -> None:
    model = VisionTransformer(
        ModelConfig(img_size=32, patch_size=16, embed_dim=64, depth=1, num_heads=1, num_classes=3)
    )
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    monkeypatch.chdir(tmp_path)
    answer = vitascope("export", "torch", "theirs.safetensors", "--json")
    assert answer.code == 0, answer.err
    report, extra = json.loads(answer.out), {"vitascope.json": ""}
    torch.export.load(report["path"], extra_files=extra)
    assert report["compared_on"] == "random" and json.loads(extra["vitascope.json"])["run"] == "theirs"


@pytest.mark.parametrize("form", ["onnx", "torch"])
def test_a_wrong_place_gets_one_sentence(vitascope, run, tmp_path, form) -> None:
    ending = {"onnx": ".onnx", "torch": ".pt2"}[form]
    (tmp_path / "file").write_text("")
    (tmp_path / f"folder{ending}").mkdir()
    unfinished = tmp_path / run.path.name
    shutil.copytree(run.path, unfinished)
    (unfinished / "model.safetensors").unlink()
    for where, out, sentence in (
        (run.path, "model.bin", f"The file 'model.bin' must end in {ending}"),
        (run.path, f"folder{ending}", "is a folder"),
        (run.path, f"file/model{ending}", "could not be created: File exists. Choose another file with --out."),
        (run.path, f"/proc/model{ending}", "Choose another file with --out."),
        (unfinished, f"model{ending}", "has no model.safetensors. Resume it with: vitascope resume"),
        (tmp_path / "none", f"model{ending}", "none"),
    ):
        answer = vitascope("export", form, str(where), "--out", str(tmp_path / out))
        assert answer.code == 2 and sentence in answer.err and answer.err.count("\n") == 1, answer.err
        assert not answer.out


@pytest.mark.parametrize("opset", ["0", "17", "26"])
def test_an_opset_that_cannot_be_written_is_refused(vitascope, run, opset) -> None:
    answer = vitascope("export", "onnx", str(run.path), "--opset", opset)
    assert (
        answer.code == 2 and answer.err == f"vitascope: --opset {opset} is not supported. Choose one from 18 to 25.\n"
    )


def test_a_missing_package_is_named_with_the_extra_that_brings_it(vitascope, run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    answer = vitascope("export", "onnx", str(run.path))
    assert answer.code == 2
    assert answer.err == 'vitascope: ONNX export needs onnxscript. Install with: pip install "vitascope[onnx]"\n'


def test_a_file_that_onnxruntime_cannot_read_is_reported(tmp_path) -> None:
    (tmp_path / "torn.onnx").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"onnxruntime [\d.]+ cannot read the file: "):
        load_onnx_as_function(tmp_path / "torn.onnx")


def test_an_error_of_onnxruntime_without_a_message_is_reported(tmp_path, monkeypatch) -> None:
    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(UserError, match="cannot read the file: RuntimeError"):
        load_onnx_as_function(tmp_path / "model.onnx")


def test_files_are_compared_with_exact_products_whatever_a_training_left(run, monkeypatch) -> None:
    model, seen, real = open_model(run).model, [], verify.compute_logits_with_all_tokens

    def noted(model, images):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return real(model, images)

    monkeypatch.setattr(verify, "compute_logits_with_all_tokens", noted)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        verify.compute_max_relative_error_per_output(
            model, lambda some: [model(some).detach()], torch.randn(10, 1, 8, 8)
        )
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert set(seen) == {(False, False)}
