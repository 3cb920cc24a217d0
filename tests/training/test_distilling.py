"""A student learns a teacher's answers: what the loss is, whom it may learn from, that it does."""

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import vitascope
from tests.training.tiny import shared_run, tiny_run
from vitascope import UserError
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.recipe.train import TrainConfig
from vitascope.run.checkpoint import LAST_WEIGHTS, read_model_info
from vitascope.run.directory import open_run_or_newest
from vitascope.training import train
from vitascope.training.hardware import Hardware
from vitascope.training.objectives.classify import Teacher, distillation_loss, open_teacher_for_classes

NAMES = [str(number) for number in range(10)]


def save_like_timm(folder, model, architecture, classes=None, **config_fields) -> str:
    """config.json and model.safetensors, as timm's own save_for_hf writes them."""
    config = {"architecture": architecture, "num_classes": model.num_classes, "label_names": classes, **config_fields}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def cnn(tmp_path_factory) -> str:
    """A small convolutional network that knows the digits, trained by a loop of this test's own."""
    train = open_builtin_digits().load_split("train")
    images, labels = train.images.float() / 255, train.labels
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=10, in_chans=1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    pixels = F.interpolate((images - 0.5) / 0.25, size=(16, 16), mode="bilinear", antialias=True)
    for _ in range(4):
        for some in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(pixels[some]), labels[some]).backward()
            optimizer.step()
    preprocessing_config = {"input_size": [1, 16, 16], "mean": [0.5], "std": [0.25]}
    folder = tmp_path_factory.mktemp("cnn")
    return save_like_timm(
        folder, model, "test_efficientnet", NAMES, model_args={"in_chans": 1}, pretrained_cfg=preprocessing_config
    )


def test_the_soft_loss_as_worked_out_by_hand() -> None:
    """Teacher (3/4, 1/4), student (1/2, 1/2): KL = 3/4 ln(3/2) + 1/4 ln(1/2)."""
    student, teacher = torch.zeros(2, 2), torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()
    expected = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    torch.testing.assert_close(distillation_loss(student, teacher, TrainConfig()), expected)
    softer = distillation_loss(student, 2 * teacher, TrainConfig(distill_temperature=2.0))
    torch.testing.assert_close(softer, 4 * expected)
    assert distillation_loss(teacher, teacher, TrainConfig(distill_temperature=3.0)).abs() < 1e-6


def test_temperature_keeps_the_size_of_gradients() -> None:
    torch.manual_seed(0)
    taught, start = torch.randn(50, 10, dtype=torch.float64), torch.randn(50, 10, dtype=torch.float64)
    sizes = []
    for temperature in (20.0, 40.0):
        student = start.clone().requires_grad_()
        distillation_loss(student, taught, TrainConfig(distill_temperature=temperature)).backward()
        sizes.append(student.grad.norm())
    assert sizes[1] / sizes[0] == pytest.approx(1, abs=0.05)


def test_the_hard_loss_is_the_teachers_choice() -> None:
    student, taught = torch.randn(5, 4), torch.randn(5, 4)
    config = TrainConfig(distill_type="hard", distill_temperature=7.0)
    torch.testing.assert_close(distillation_loss(student, taught, config), F.cross_entropy(student, taught.argmax(1)))


def test_the_teacher_sees_the_students_image_in_its_own_size_and_colours() -> None:
    seen = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, images):
            seen.append(images)
            return images.mean((2, 3))

    ours, theirs = Preprocessing((4, 4), (0.5,), (0.5,)), Preprocessing((8, 8), (0.0, 0.5, 1.0), (1.0, 0.5, 2.0))
    teacher = Teacher(Looking(), ours, theirs, [2, 0, 1])
    logits = teacher(ours.normalize(torch.full((2, 1, 4, 4), 0.75)))
    assert seen[0].shape == (2, 3, 8, 8)
    assert logits[0].tolist() == pytest.approx([-0.125, 0.75, 0.5])
    assert not logits.requires_grad


def test_a_students_labels_may_be_wrong_where_a_cnn_teaches_it(cnn, tmp_path) -> None:
    """The teacher alone counts (distill_alpha=1), and the labels are shuffled: the digits are learnt anyway."""
    parts = {name: open_builtin_digits().load_split(name) for name in ("train", "test")}
    arrays = {f"x_{name}": part.images.permute(0, 2, 3, 1).numpy() for name, part in parts.items()}
    labels = {f"y_{name}": part.labels.numpy() for name, part in parts.items()}
    shuffled = np.random.default_rng(0).permutation(labels["y_train"])
    np.savez(tmp_path / "wrong.npz", **arrays, **(labels | {"y_train": shuffled}))
    settings = {
        "data.name": str(tmp_path / "wrong.npz"),
        "train.epochs": 15,
        "data.augment.shift": 0,
        "train.optimizer": "muon",
    }
    taught = {"train.distill": cnn, "train.distill_alpha": 1.0}
    alone = tiny_run(tmp_path / "alone", **settings)
    student = tiny_run(tmp_path / "taught", **settings, **taught)
    scores = [vitascope.load(run).evaluate("test").accuracy for run in (alone, student)]
    assert scores[0] < 0.3 and scores[1] > 0.8, scores
    assert student.recipe.train.distill == cnn


@pytest.mark.parametrize("how", ["soft", "hard"])
def test_learning_from_a_run_goes_on_exactly_after_a_stop(tmp_path, how) -> None:
    teacher = shared_run(tmp_path / "teacher", **{"train.epochs": 2})
    settings = {"train.distill": str(tmp_path / "teacher" / "digits"), "train.distill_type": how}  # its newest run
    whole = tiny_run(tmp_path / "whole", **settings)
    assert whole.recipe.train.distill == str(teacher.path.resolve())
    plain = shared_run(tmp_path / "plain")
    assert whole.metrics[-1]["train_loss"] != plain.metrics[-1]["train_loss"]
    stopped = _stopped_after_one_epoch(tmp_path / "stopped", settings)
    vitascope.resume(stopped, quiet=True)
    assert stopped.get_path(LAST_WEIGHTS).read_bytes() == whole.get_path(LAST_WEIGHTS).read_bytes()


def _stopped_after_one_epoch(folder, settings):
    def once(records, *_):
        yield next(record for record in records if isinstance(record, train.EpochRecord))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "show_progress_and_yield_epochs", once)
        with pytest.raises(KeyboardInterrupt):
            tiny_run(folder, **settings)
    return open_run_or_newest(folder / "digits")


def test_without_a_share_the_teacher_changes_nothing(cnn, tmp_path) -> None:
    chance = {"model.drop_path_rate": 0.3}  # whose draws must not be the teacher's
    plain = tiny_run(tmp_path / "plain", **chance)
    taught = tiny_run(tmp_path / "taught", **chance, **{"train.distill": cnn, "train.distill_alpha": 0.0})
    assert [row["train_loss"] for row in plain.metrics] == [row["train_loss"] for row in taught.metrics]


def test_teachers_that_cannot_teach_are_refused_before_a_run_is_made(cnn, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    model = timm.create_model("test_resnet", num_classes=7, in_chans=1)
    word = save_like_timm(other, model, "test_resnet", model_args={"in_chans": 1})
    for teacher, sentence in [
        (word, "has 7 classes, but the data has 10"),
        (str(tmp_path / "nowhere"), "There is no run .*, and no weights of this name"),
        ("timm:resnet19", "timm has no model 'resnet19'"),
    ]:
        with pytest.raises(UserError, match=sentence):
            tiny_run(tmp_path / "runs", **{"train.distill": teacher})
    (other / "config.json").write_text(json.dumps({"architecture": "test_resnet", "num_classes": 10}))
    with pytest.raises(UserError, match="do not fit test_resnet"):
        tiny_run(tmp_path / "runs", **{"train.distill": word})
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match="distill_alpha=2"):
        TrainConfig(distill_alpha=2.0)


HERE = Hardware("cpu", "float32", compiled=False, captured=False, threads=1)


def order_of(folder, theirs, classes, **config_fields):
    folder.mkdir(exist_ok=True)
    word = save_like_timm(folder, timm.create_model("test_resnet", num_classes=len(classes)), "test_resnet", theirs)
    return open_teacher_for_classes(
        word, vitascope.open_model(word).preprocessing, classes, HERE, **config_fields
    ).class_order


def test_classes_are_matched_by_name(tmp_path) -> None:
    names = ["cat", "dog", "owl"]
    assert order_of(tmp_path / "a", names, ["owl", "cat", "dog"]) == [2, 0, 1]
    assert order_of(tmp_path / "a", names, names) is None
    with pytest.raises(UserError, match="has no class 'cow'"):
        order_of(tmp_path / "a", names, ["owl", "cow", "dog"])


def test_numbers_are_names_where_both_sides_have_them_and_none_where_one_has(tmp_path) -> None:
    """Folders sort 10 before 2: numbers must be matched as names are."""
    numbers = [str(number) for number in range(12)]
    assert order_of(tmp_path / "a", numbers, sorted(numbers)) == [int(name) for name in sorted(numbers)]
    named = ["cat", "dog", "owl"]
    assert order_of(tmp_path / "a", ["LABEL_0", "LABEL_1", "LABEL_2"], named) is None
    assert order_of(tmp_path / "a", named, ["0", "1", "2"], has_class_names=False) is None
    assert order_of(tmp_path / "a", [*named, "cow"], named) is None  # four names for three classes say nothing


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [("test_resnet", {"in_chans": 1}, (160, 160)), ("test_vit", {"img_size": 32, "in_chans": 1}, (32, 32))],
)
def test_a_teacher_saved_by_timm_itself_is_asked_in_its_own_size_and_channels(name, settings, size, tmp_path) -> None:
    from timm.models import save_for_hf

    model = timm.create_model(name, num_classes=10, **settings)
    save_for_hf(model, tmp_path, model_args=settings)
    teacher = vitascope.open_model(str(tmp_path))
    assert teacher.preprocessing.size == size and len(teacher.preprocessing.mean) == 1
    assert open_teacher_for_classes(str(tmp_path), teacher.preprocessing, NAMES, HERE)(
        torch.zeros(2, 1, *size)
    ).shape == (
        2,
        10,
    )


def test_a_run_goes_on_only_with_the_teacher_it_began_with(tmp_path) -> None:
    teacher = shared_run(tmp_path / "teacher", **{"train.epochs": 1})
    stopped = _stopped_after_one_epoch(tmp_path / "stopped", {"train.distill": str(teacher.path)})
    other = tiny_run(tmp_path / "other", **{"train.epochs": 1, "train.seed": 5})
    teacher.get_path(LAST_WEIGHTS).write_bytes(other.get_path(LAST_WEIGHTS).read_bytes())
    with pytest.raises(UserError, match="the teacher's weights have changed"):
        vitascope.resume(stopped, quiet=True)


def test_any_model_of_ours_is_opened_as_it_was_trained(tmp_path) -> None:
    run = shared_run(tmp_path, **{"train.epochs": 1})
    opened_model = vitascope.open_model(str(run.path))
    assert opened_model.classes == NAMES and opened_model.preprocessing == read_model_info(run).preparation
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(opened_model.model(images), vitascope.load(run.get_path(LAST_WEIGHTS))(images))
