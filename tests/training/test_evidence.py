"""What is read off features without labels: neighbours, linear probe, spread; and where that leads: fine-tuning."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitascope
from tests.training.tiny import TINY, tiny_run
from vitascope import UserError
from vitascope.data.config import NO_AUGMENTATION, AugmentConfig
from vitascope.data.image_ops import crop_and_resize
from vitascope.data.sampling import draw_epoch_augmentation_parameters
from vitascope.recipe.reading import read_recipe
from vitascope.run.listing import summarize_run
from vitascope.training.initial_weights import read_first_stage_recipe
from vitascope.training.objectives.feature_metrics import (
    PROBE_WEIGHT_DECAY,
    compute_rms_spread_of_unit_features,
    fit_linear_probe,
    predict_classes_by_knn,
)
from vitascope.training.objectives.mae import Mae

QUICK = {"train.epochs": 8, "train.probe_every": 4}


def test_neighbours_vote_by_nearness() -> None:
    """By hand: a very near neighbour outvotes two farther ones; each weighs exp(similarity / 0.07)."""
    known = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    labels = torch.tensor([1, 0, 0])
    assert predict_classes_by_knn(known, labels, torch.tensor([[2.0, 0.1]]), 2, num_neighbours=3).tolist() == [1]
    assert predict_classes_by_knn(known, labels, torch.tensor([[0.1, 5.0]]), 2, num_neighbours=1).tolist() == [0]
    asked = torch.randn(2500, 2)  # in more than one part
    assert len(predict_classes_by_knn(known, labels, asked, 2)) == 2500


def test_the_linear_probe_is_scikit_learns_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    rng = torch.Generator().manual_seed(0)
    features = torch.randn(300, 6, generator=rng) * torch.tensor([1.0, 5, 0.2, 1, 1, 1]) + 3
    labels = (features[:, 0] + features[:, 1] / 5 + torch.randn(300, generator=rng)).sign().clamp(min=0).long()
    labels[:60] = 2
    scaled = (features - features.mean(0)) / features.std(0)
    theirs = LogisticRegression(C=1 / (2 * 300 * PROBE_WEIGHT_DECAY), tol=1e-8, max_iter=5000).fit(
        scaled.numpy(), labels.numpy()
    )
    ours = fit_linear_probe(features, labels, 3)(features).softmax(1).numpy()
    np.testing.assert_allclose(ours, theirs.predict_proba(scaled.numpy()), atol=2e-3)


def test_a_feature_that_never_changes_does_not_break_the_probe() -> None:
    features = torch.cat([torch.randn(50, 3), torch.ones(50, 1)], dim=1)
    probe = fit_linear_probe(features, (features[:, 0] > 0).long(), 2)
    assert probe.weight.isfinite().all() and (probe(features).argmax(1) == (features[:, 0] > 0)).float().mean() > 0.95


def test_the_spread_is_one_everywhere_and_zero_for_all_the_same() -> None:
    assert compute_rms_spread_of_unit_features(torch.randn(2000, 64)) == pytest.approx(1, abs=0.01)
    assert compute_rms_spread_of_unit_features(torch.ones(10, 5) * torch.arange(1, 11)[:, None]) == pytest.approx(
        0, abs=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["digits-dino", "digits-mae"])
def test_learning_without_labels_improves_the_linear_probe_over_random_features(tmp_path, recipe) -> None:
    """On validation images, against a run whose steps change nothing."""
    settings = {"train.epochs": 20, "train.probe_every": 20, "data.validation": 0.3}
    still = {"train.lr": 1e-9, "train.muon_lr": 1e-9, "train.epochs": 1}
    random = vitascope.train(recipe, runs=tmp_path, quiet=True, **(settings | still))
    learnt = vitascope.train(recipe, runs=tmp_path, quiet=True, **settings)
    before, after = (run.metrics[-1]["val_accuracy"] for run in (random, learnt))
    assert after > before + 0.15
    assert learnt.metrics[-1]["knn_accuracy"] > random.metrics[-1]["knn_accuracy"] + 0.15
    assert not learnt.get_path("alarms.jsonl").exists()


@pytest.mark.parametrize("objective", ["mae", "dino"])
def test_labels_are_only_looked_at_so_shuffling_them_changes_no_weight(tmp_path, monkeypatch, objective) -> None:
    """All weights but the classifier's are the same whatever the training images' labels say."""
    from vitascope.training import prepare as module

    settings = {"train.objective": objective} | ({"dino.local_size": 4, "train.ema": 0} if objective == "dino" else {})
    plain = tiny_run(tmp_path, **settings)
    real = module.open_data_and_print_notes

    def shuffled(recipe, console):
        data = real(recipe, console)
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
        object.__setattr__(data.train, "labels", data.train.labels[order])
        return data

    monkeypatch.setattr(module, "open_data_and_print_notes", shuffled)
    other = tiny_run(tmp_path, **settings)
    ours, theirs = (load_file(run.get_path("model.safetensors")) for run in (plain, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("head."))
    assert not torch.equal(ours["head.weight"], theirs["head.weight"])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("mae"), **{"train.objective": "mae", "train.ema": 0.9})


@pytest.mark.slow
def test_a_pretraining_run_answers_explains_and_exports_like_any_other(pretrained, tmp_path, vitascope) -> None:
    """Its classifier is the linear probe of its last epoch, fitted to all training images."""
    run = str(pretrained.path)
    scored = json.loads(vitascope("evaluate", run, "--split", "val", "--quick", "--json").out)
    assert scored["accuracy"] == pytest.approx(pretrained.metrics[-1]["val_accuracy"], abs=1e-6)
    assert vitascope("export", "onnx", run, "--out", str(tmp_path / "x.onnx")).code == 0
    image = pretrained.get_path("reconstructions/epoch-0001.png")
    assert vitascope("explain", run, str(image), "--out", str(tmp_path / "seen")).code == 0
    assert vitascope("export", "folder", run, "--out", str(tmp_path / "folder")).code == 0
    assert "The classifier is a linear probe" in (tmp_path / "folder" / "README.md").read_text()
    listed = vitascope("runs", "list", "--runs", str(pretrained.path.parent.parent))
    assert listed.code == 0 and "digits" in listed.out


def test_probe_tells_neighbours_and_linear_and_notes_a_look_at_test_images(pretrained, vitascope) -> None:
    run = str(pretrained.path)
    answer = vitascope("probe", run)
    assert answer.code == 0 and "k-nearest neighbours (k=20)" in answer.out and "linear probe" in answer.out
    report = json.loads(vitascope("probe", run, "--json").out)
    assert report["linear"] == pytest.approx(pretrained.metrics[-1]["val_accuracy"], abs=0.012)
    assert report["knn"] == pytest.approx(pretrained.metrics[-1]["knn_accuracy"], abs=0.012)
    before = pretrained.get_path("test-openings.jsonl").exists()
    few = json.loads(vitascope("probe", run, "--split", "test", "--labels", "0.1", "--json").out)
    assert few["known"] == 80 and few["split"] == "test"
    assert not before and '"probe, last"' in pretrained.get_path("test-openings.jsonl").read_text()
    assert summarize_run(pretrained).test_accuracy is None  # a probe's number is not the run's


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--split", "train"], "The probe is fitted on the training images"),
        (["--split", "nothing"], "There is no split 'nothing'"),
        (["--neighbours", "0"], "must be at least 1"),
        (["--labels", "1.5"], "(a fraction of the training labels), not 1.5."),
        (["--max-images", "-1"], "must be 0 (all) or more"),
        (["--max-images", "3"], "Use at least 10: one image per class"),
        (["--most", "3"], "--most was renamed to --max-images."),
    ],
)
def test_probe_refuses(pretrained, vitascope, words, text) -> None:
    answer = vitascope("probe", str(pretrained.path), *words)
    assert answer.code == 2 and text in answer.err


def test_fine_tuning_begins_with_a_new_classifier_and_the_learnt_blocks(pretrained, tmp_path) -> None:
    """The probe has seen all labels; a fine-tuning with a tenth of them must not."""
    still = {"train.epochs": 1, "train.lr": 1e-9, "train.muon_lr": 1e-9}
    run = tiny_run(tmp_path, **{"weights": pretrained.path, "data.fraction": 0.1}, **still)
    report = json.loads(run.get_path("adaptation.json").read_text())
    assert report["new"] == report["dropped"] == ["head.weight", "head.bias"]
    assert report["notes"] == ["head replaced: it is a linear probe"]
    before, after = load_file(pretrained.get_path("model.safetensors")), load_file(run.get_path("model.safetensors"))
    torch.testing.assert_close(after["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"], atol=1e-6, rtol=0)
    assert not torch.allclose(after["head.weight"], before["head.weight"])
    assert json.loads(run.get_path("config.json").read_text())["probe"] is False
    again = tiny_run(tmp_path, **{"weights": run.path, "train.epochs": 1})  # its classifier was learnt: it is kept
    assert json.loads(again.get_path("adaptation.json").read_text())["new"] == []


def test_one_recipe_names_both_stages_and_the_first_is_not_repeated(tmp_path, capsys, monkeypatch) -> None:
    first = tmp_path / "before.yaml"
    settings = "".join(f"  {key.removeprefix('train.')}: {value}\n" for key, value in TINY.items() if "train." in key)
    model = "model: {img_size: 8, patch_size: 2, in_chans: 1, num_classes: 10, embed_dim: 16, depth: 2, num_heads: 2}\n"
    first.write_text(f"data: {{name: digits}}\n{model}train:\n  objective: mae\n{settings}mae: {{decoder_dim: 16}}\n")
    later = tmp_path / "later.yaml"
    later.write_text(
        f"weights: recipe:{first}\ndata: {{name: digits, validation: 0.2, fraction: 0.5}}\n{model}train:\n{settings}"
    )
    run = vitascope.train(str(later), runs=tmp_path / "runs", **{"train.seed": 4})
    [before] = (tmp_path / "runs" / "before").iterdir()
    stage = vitascope.run.directory.open_run_or_newest(before).recipe
    assert (stage.data.validation, stage.data.fraction, stage.train.seed) == (0.2, 1.0, 4)
    assert run.recipe.weights == str(before.resolve())
    vitascope.train(str(later), runs=tmp_path / "runs", quiet=True, **{"train.seed": 4, "train.lr": 2e-3})
    assert len(list((tmp_path / "runs" / "before").iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(Mae, "validate", stopped_by_hand)
        with pytest.raises(KeyboardInterrupt):
            vitascope.train(str(later), runs=tmp_path / "runs", **{"train.seed": 5})
    vitascope.train(str(later), runs=tmp_path / "runs", quiet=True, **{"train.seed": 5})
    assert len(list((tmp_path / "runs" / "before").iterdir())) == 2
    output = capsys.readouterr().out
    assert (
        "First stage: before" in output
        and "To resume it and continue with the second, run the same command again" in output
    )


def stopped_by_hand(*_) -> None:
    raise KeyboardInterrupt


def test_a_stage_holds_the_same_images_back_and_has_no_stage_of_its_own(tmp_path) -> None:
    stage = read_first_stage_recipe(
        read_recipe(
            "cifar10-ssl", ["data.validation=0.3", "train.seed=9", "data.memory=2", "data.fingerprint=contents"]
        )
    )
    assert (stage.data.memory, stage.data.fingerprint) == (2, "contents")
    assert stage.train.objective == "dino" and stage.data.validation == 0.3 and stage.train.seed == 9
    third = tmp_path / "third.yaml"
    third.write_text("weights: recipe:cifar10-ssl\n")
    with pytest.raises(UserError, match="At most two stages are supported"):
        read_first_stage_recipe(read_recipe(str(third)))
    with pytest.raises(UserError, match="There is no recipe 'nothing'"):
        read_first_stage_recipe(read_recipe("cifar10", ["weights=recipe:nothing"]))


def test_a_crop_is_a_rectangle_of_the_image_enlarged() -> None:
    """By hand: a quarter of the area, in the middle and in the corners of an image that counts its columns."""
    image = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    half = torch.tensor(0.5)

    def cut(row: float, column: float) -> torch.Tensor:
        return crop_and_resize(image, torch.tensor([[half, half, row, column]]), (0.25, 0.25), (4, 4))[0, 0]

    assert cut(0.5, 0.5)[0].tolist() == pytest.approx([2, 3, 4, 5], abs=1e-5)
    assert cut(0.0, 0.0)[3].tolist() == pytest.approx([0, 1, 2, 3], abs=1e-5)
    assert cut(1.0, 1.0)[3].tolist() == pytest.approx([4, 5, 6, 7], abs=1e-5)
    whole = crop_and_resize(image, torch.full((1, 4), 0.5), (1.0, 1.0))
    torch.testing.assert_close(whole, image, atol=1e-5, rtol=0)


def test_crops_have_the_asked_share_of_the_area() -> None:
    """Read off a picture of coordinates: how far the outermost pixels of the crop lie apart."""
    side = torch.linspace(-1 + 1 / 64, 1 - 1 / 64, 64)
    places = torch.stack(torch.meshgrid(side, side, indexing="ij")).expand(500, 2, 64, 64)
    draw = draw_epoch_augmentation_parameters(AugmentConfig(crop_scale=(0.2, 1.0)), 1, 500, seed=0, epoch=0)["crop"][0]
    crops = crop_and_resize(places, draw, (0.2, 0.6), (32, 32))
    tall, wide = (crops[:, 0, -1, 0] - crops[:, 0, 0, 0]) / 2, (crops[:, 1, 0, -1] - crops[:, 1, 0, 0]) / 2
    area = (tall * 32 / 31) * (wide * 32 / 31)
    assert area.min() > 0.19 and area.max() < 0.61 and area.mean() == pytest.approx(0.4, abs=0.02)
    ratio = wide / tall
    assert ratio.min() > 0.74 and ratio.max() < 1.35 and crops.abs().max() <= 1


def test_grey_and_solarized_shares_and_a_crop_for_labels_too(tmp_path) -> None:
    from dataclasses import replace

    from vitascope.data.image_ops import grayscale_selected, solarize_selected

    draws = draw_epoch_augmentation_parameters(
        replace(NO_AUGMENTATION, grayscale=0.25, solarize=0.5), 10, 1000, seed=0, epoch=0
    )
    assert draws["grayscale"].float().mean() == pytest.approx(0.25, abs=0.02)
    assert draws["solarize"].float().mean() == pytest.approx(0.5, abs=0.02)
    image = torch.tensor([0.2, 0.9, 0.5]).view(1, 3, 1, 1).expand(2, 3, 1, 1)
    turned = solarize_selected(image, torch.tensor([True, False]))
    assert turned[0].flatten().tolist() == pytest.approx([0.2, 0.1, 0.5]) and torch.equal(turned[1], image[1])
    assert grayscale_selected(image, torch.tensor([True, False]))[0].unique().numel() == 1
    run = tiny_run(tmp_path, **{"data.augment.crop_scale": [0.5, 1.0], "train.epochs": 1})
    assert run.recipe.data.augment.crop_scale == (0.5, 1.0)
    with pytest.raises(UserError, match=r"must be a range .* of areas with 0 < from"):
        AugmentConfig(crop_scale=(0.9, 0.5))


def test_weights_that_saw_the_validation_images_are_told_of(pretrained, tmp_path, capsys) -> None:
    import vitascope

    for seed, is_warned in ((0, False), (1, True)):
        settings = TINY | {"weights": pretrained.path, "train.seed": seed, "train.epochs": 1}
        vitascope.train("digits", runs=tmp_path, **settings)
        assert ("validation accuracy will be too high" in capsys.readouterr().out) is is_warned


@pytest.mark.slow
def test_a_later_stage_that_says_nothing_of_the_model_takes_the_first_ones(tmp_path) -> None:
    import vitascope

    later = tmp_path / "later.yaml"
    later.write_text("weights: recipe:digits-mae\ndata: {name: digits}\ntrain: {epochs: 1, device: cpu}\n")
    first = {"train.epochs": 30}
    vitascope.train("digits-mae", runs=tmp_path / "runs", quiet=True, **{"train.device": "cpu"}, **first)
    run = vitascope.train(str(later), runs=tmp_path / "runs", quiet=True)
    assert run.recipe.model.img_size == 8 and run.recipe.model.embed_dim == 32
    assert len(list((tmp_path / "runs" / "digits-mae").iterdir())) == 1
