"""DINO: the loss by hand and by a second computation, schedules, centre, frozen prototypes, crops, collapse."""

import math

import pytest
import torch

from tests.training.test_captured import check_recorded_as_plain
from tests.training.test_runs import build_state_and_run, check_refused
from tests.training.tiny import tiny_run
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.data.config import AugmentConfig
from vitascope.model.pretraining import PrototypeHead, ResolutionAdapter
from vitascope.recipe.choices import complete_augmentation_for_objective
from vitascope.recipe.reading import read_recipe
from vitascope.training.engines.single_run import EagerEngine
from vitascope.training.objectives.dino import DinoConfig, detect_teacher_collapse, make_augment_config_per_view
from vitascope.training.objectives.dino_loss import dino_loss
from vitascope.training.objectives.self_supervised import detect_feature_collapse
from vitascope.training.optim.schedule import compute_schedule_values
from vitascope.training.step import MetricSums

DINO = {
    "train.objective": "dino",
    "train.ema": 0,
    "dino.prototypes": 32,
    "dino.hidden": 16,
    "dino.bottleneck": 8,
    "dino.local_crops": 2,
    "dino.local_size": 4,
    "train.epochs": 3,
}


def test_the_loss_by_hand() -> None:
    """Two views, two prototypes: sigmoid(1) = 0.731059, so the loss is 0.731059 · 1.313262 + 0.268941 · 0.313262."""
    student = torch.tensor([[[0.1, 0.0]], [[0.0, 0.1]]])
    teacher = torch.tensor([[[0.04, 0.0]], [[0.0, 0.04]]])
    loss = dino_loss(student, teacher, torch.zeros(2), 0.1, 0.04)
    assert loss.loss.item() == pytest.approx(1.044320, abs=1e-5)
    assert loss.teacher_entropy.item() == pytest.approx(0.582203, abs=1e-5)
    assert loss.prototypes_used.item() == pytest.approx(2.0, abs=1e-5)


def test_equal_answers_cost_ln_k_whatever_the_temperatures() -> None:
    same = torch.full((4, 3, 1024), 0.3)
    loss = dino_loss(same, same[:2], torch.zeros(1024), 0.1, 0.04)
    assert loss.loss.item() == pytest.approx(math.log(1024), abs=1e-4)
    assert loss.divergence.item() == pytest.approx(0, abs=1e-4)


def test_the_loss_is_the_mean_over_all_pairs_of_different_crops() -> None:
    """A second computation: pair by pair, image by image, in float64."""
    student, teacher, centre = torch.randn(5, 3, 7), torch.randn(2, 3, 7), torch.randn(7)
    pairs = []
    for their, t in enumerate(teacher.double()):
        for our, s in enumerate(student.double()):
            if our != their:
                wanted = torch.softmax((t - centre.double()) / 0.5, 1)
                pairs.append(-(wanted * torch.log_softmax(s / 0.2, 1)).sum(1).mean())
    assert len(pairs) == 2 * (5 - 1)
    loss = dino_loss(student, teacher, centre, 0.2, 0.5)
    assert loss.loss.item() == pytest.approx(torch.stack(pairs).mean().item(), rel=1e-5)


def test_the_loss_ignores_a_constant_in_teacher_and_centre_and_the_order_of_small_crops() -> None:
    student, teacher, centre, more = torch.randn(5, 3, 7), torch.randn(2, 3, 7), torch.randn(7), torch.randn(7)
    loss = dino_loss(student, teacher, centre, 0.1, 0.07).loss
    torch.testing.assert_close(dino_loss(student, teacher + more, centre + more, 0.1, 0.07).loss, loss)
    torch.testing.assert_close(dino_loss(student[[0, 1, 4, 2, 3]], teacher, centre, 0.1, 0.07).loss, loss)
    swapped = dino_loss(student[[1, 0, 2, 3, 4]], teacher, centre, 0.1, 0.07).loss
    assert not torch.isclose(swapped, loss)  # the large ones are paired with the teacher's


def test_schedules_start_and_end_where_they_should() -> None:
    words = ["train.objective=dino", "train.weight_decay=0.04", "train.final_weight_decay=0.4", "dino.freeze_last=0.05"]
    recipe = read_recipe("digits-dino", [*words, "dino.teacher_momentum=0.996", "dino.final_teacher_temperature=0.07"])
    first, tenth, middle, last = (compute_schedule_values(step, 100, recipe) for step in (0, 10, 50, 99))
    assert first["ema_decay"] == pytest.approx(0.996) and middle["ema_decay"] == pytest.approx(0.998)
    assert last["ema_decay"] == pytest.approx(0.999999, abs=1e-6) and last["ema_decay"] < 1
    assert first["teacher_temperature"] == pytest.approx(0.04)
    assert tenth["teacher_temperature"] == last["teacher_temperature"] == pytest.approx(0.07)
    assert compute_schedule_values(5, 100, recipe)["teacher_temperature"] == pytest.approx(0.055)
    assert first["weight_decay"] == pytest.approx(0.04) and middle["weight_decay"] == pytest.approx(0.22)
    assert [compute_schedule_values(step, 100, recipe)["last_layer_grad_factor"] for step in (0, 4, 5, 99)] == [
        0,
        0,
        1,
        1,
    ]


def test_a_changing_decay_is_adamws_own_decay(tmp_path) -> None:
    """0.3 throughout, done by AdamW itself and done step by step: the same weights."""
    one = tiny_run(tmp_path, **{"train.weight_decay": 0.3, "train.optimizer": "muon"})
    other = tiny_run(
        tmp_path, **{"train.weight_decay": 0.3, "train.final_weight_decay": 0.3, "train.optimizer": "muon"}
    )
    assert untimed_losses(one) == pytest.approx(untimed_losses(other), rel=1e-5)
    weaker = tiny_run(
        tmp_path, **{"train.weight_decay": 0.3, "train.final_weight_decay": 0.0, "train.optimizer": "muon"}
    )
    assert untimed_losses(weaker) != pytest.approx(untimed_losses(one), rel=1e-5)


def untimed_losses(run) -> list[float]:
    return [row["train_loss"] for row in run.metrics]


def stepped(tmp_path, steps: int, **settings):
    """A state after so many plain steps."""
    state, _ = build_state_and_run(tmp_path, **(DINO | settings))
    engine = EagerEngine(state, MetricSums.empty(state))
    engine.start_epoch(0)
    for _ in range(steps):
        engine.run_next_step()
        state.step += 1
    engine.close()
    return state


def test_the_centre_moves_a_tenth_towards_what_the_teacher_said(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **DINO)
    heads, teacher_logits = state.objective.heads, []
    real = state.objective.teacher_network.forward
    state.objective.teacher_network.forward = lambda crops: teacher_logits.append(real(crops)) or teacher_logits[-1]
    engine = EagerEngine(state, MetricSums.empty(state))
    engine.start_epoch(0)
    engine.run_next_step()
    engine.close()
    assert teacher_logits[0].shape[0] == 2 * state.batch_size  # the two large crops only
    torch.testing.assert_close(heads.centre, 0.1 * teacher_logits[0].mean(0))
    assert (heads.seen == 0).all()


def test_the_teacher_follows_the_student_and_gets_no_gradient(tmp_path) -> None:
    state = stepped(tmp_path, 1, **{"dino.teacher_momentum": 0.5, "dino.freeze_last": 0})
    before, _ = build_state_and_run(tmp_path, **(DINO | {"dino.teacher_momentum": 0.5}))
    heads, old = state.objective.heads, before.objective.heads
    for new, was, student in zip(
        heads.teacher.parameters(), old.teacher.parameters(), heads.student.parameters(), strict=True
    ):
        torch.testing.assert_close(new, (was + student) / 2, atol=1e-6, rtol=1e-4)
        assert new.grad is None and not new.requires_grad
    assert all(not weight.requires_grad for weight in state.ema.model.parameters())
    assert not any(weight.requires_grad for weight in state.model.head.parameters())


def test_prototypes_are_frozen_at_first_and_learn_later(tmp_path) -> None:
    start, _ = build_state_and_run(tmp_path, **DINO)
    drawn = start.objective.heads.student.prototypes
    frozen = stepped(tmp_path, 3, **{"dino.freeze_last": 1.0})
    free = stepped(tmp_path, 3, **{"dino.freeze_last": 0.0})
    assert torch.equal(frozen.objective.heads.student.prototypes, drawn)
    assert not torch.allclose(free.objective.heads.student.prototypes, drawn)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_the_head_answers_with_cosines(batch_norm) -> None:
    head = PrototypeHead(embed_dim=8, hidden_width=16, bottleneck_width=4, num_prototypes=50, batch_norm=batch_norm)
    answers = head(10 * torch.randn(20, 8))
    assert answers.abs().max() <= 1 + 1e-6 and answers.std() > 0.1
    with torch.no_grad():
        head.prototypes.mul_(3)  # only directions count
    again = head.eval()(torch.ones(2, 8) * torch.tensor([[1.0], [2.0]]))
    assert again.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "rotary", "learned+rotary", "none"])
@pytest.mark.parametrize("class_token", [True, False])
def test_a_model_sees_its_own_size_through_other_size_as_ever(positions, class_token) -> None:
    pool = "token" if class_token else "avg"
    config = ModelConfig(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, positions=positions, class_token=class_token,
        global_pool=pool,
    )  # fmt: skip
    model, images = VisionTransformer(config).eval(), torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(
        ResolutionAdapter(config, (16, 16))(model, images), model.compute_pooled_features(images), atol=1e-5, rtol=1e-5
    )
    small = ResolutionAdapter(config, (8, 8))(model, images[..., :8, :8])
    assert small.shape == (3, 32) and small.isfinite().all()


def test_views_are_two_large_crops_and_small_ones_and_only_the_second_is_solarized() -> None:
    augment = complete_augmentation_for_objective(AugmentConfig(), "cifar10", 3, "dino")
    first, second, *small = make_augment_config_per_view(augment, DinoConfig(local_crops=3))
    assert first.crop_scale == second.crop_scale == (0.4, 1.0)
    assert len(small) == 3 and small[0].crop_scale == (0.15, 0.4)
    assert first.solarize == small[0].solarize == 0 and second.solarize == 0.2
    assert not augment.cutmix and not augment.mixup and not augment.shift


def test_every_crop_of_an_image_has_its_own_draws(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **DINO)
    draws = state.objective.draw_random_numbers_of_epoch(2, 5, epoch=0)
    assert {name.split("/")[0] for name in draws} == {"0", "1", "2", "3"}
    assert not torch.equal(draws["0/crop"], draws["1/crop"]) and not torch.equal(draws["2/crop"], draws["3/crop"])
    crops = state.objective.augment_batch(
        state.data.train.images[:5], state.data.train.labels[:5], {name: draw[0] for name, draw in draws.items()}
    )
    assert [tuple(crop.shape[2:]) for crop in crops] == [(8, 8), (8, 8), (4, 4), (4, 4)]


def test_the_recorded_step_learns_what_the_plain_one_learns(tmp_path) -> None:
    """RMSNorm, because a LayerNorm's last bias has no gradient behind a batch norm, and AdamW enlarges its rounding."""
    settings = {"train.final_weight_decay": 0.2, "dino.freeze_last": 0.2, "model.norm": "rmsnorm"}
    settings |= {"train.lr": 1e-3, "train.muon_lr": 3e-3}  # the student is compared too, whose rounding grows with them
    check_recorded_as_plain(tmp_path, **(DINO | settings))


def test_the_alarm_tells_the_two_collapses_and_is_silent_otherwise() -> None:
    healthy = {"epoch": 5, "train_loss": 5.0, "teacher_entropy": 4.4, "divergence": 0.6, "prototypes_used": 300.0}
    assert detect_teacher_collapse(healthy, 20, 1024) is None
    uniform = healthy | {"train_loss": 6.931, "teacher_entropy": 6.930, "divergence": 0.001, "prototypes_used": 1024.0}
    alarm = detect_teacher_collapse(uniform, 20, 1024)
    assert alarm.collapse_type == "uniform" and "ln 1024 = 6.931" in alarm.text and "teacher_temperature" in alarm.text
    assert (
        detect_teacher_collapse(uniform | {"epoch": 1}, 20, 1024) is None
    )  # before anything was learnt, answers are alike
    one = healthy | {"train_loss": 0.0, "teacher_entropy": 0.0, "divergence": 0.0, "prototypes_used": 1.0}
    assert (
        detect_teacher_collapse(one, 20, 1024).collapse_type == "one answer"
        and "center_momentum" in detect_teacher_collapse(one, 20, 1024).text
    )
    same = healthy | {"feature_spread": 0.001}
    assert detect_teacher_collapse(same, 20, 1024) is None
    assert detect_feature_collapse(same, 20).collapse_type == "features"
    assert detect_feature_collapse({"epoch": 9, "feature_spread": 0.2}, 20) is None
    assert detect_feature_collapse({"epoch": 9, "feature_spread": 0.001}, 20).collapse_type == "features"
    assert detect_feature_collapse({"epoch": 2, "feature_spread": 0.001}, 20) is None


@pytest.mark.slow
def test_a_student_that_collapses_sounds_the_alarm_and_the_recipe_does_not(tmp_path, capsys) -> None:
    """Without centring and with a hurried teacher every image gets the same answer."""
    import vitascope

    settings = {"train.epochs": 6, "dino.hidden": 64, "dino.bottleneck": 32}
    bad = {"dino.center_momentum": 1.0, "dino.teacher_momentum": 0.5, "dino.batch_norm": False, "train.muon_lr": 0.05}
    run = vitascope.train("digits-dino", runs=tmp_path, **settings, **bad)
    assert "one answer" in run.get_path("alarms.jsonl").read_text()
    assert capsys.readouterr().out.count("every image has the same output") == 1
    healthy = vitascope.train("digits-dino", runs=tmp_path, **settings)
    assert not healthy.get_path("alarms.jsonl").exists()


REFUSED = {
    "dino.local_size=5": "dino.local_size=5 must be a multiple of model.patch_size=2",
    "dino.local_size=16": "at most model.img_size=8",
    "train.patience=3": "train.patience=3 needs labels",
    "train.distill=x": "train.distill=x needs labels",
    "data.balance=loss": "data.balance=loss needs labels",
    "dino.teacher_momentum=1": "never updates the teacher",
    "dino.global_crops_scale=[0.9,0.5]": "0 < from ≤ to ≤ 1",
    "dino.prototypes=1": "dino.prototypes=1 is too small",
    "dino.student_temperature=0": "must be greater than 0",
    "model.positions=sinusoidal": "does not work with local crops",
    "train.ema=0.9": "its teacher is the EMA",
    "train.grad_accum_steps=2": "does not work with dino.batch_norm, which needs the whole batch",
    "mae.mask_ratio=0.5": "mae.… needs train.objective=mae",
    "dino.global_crops_scale=0.5": "must be a range",
    "dino.global_crops_scale=[0.5]": "must be a range",
    "weights=recipe:": "names no recipe",
    "model.merge_tokens=1": "model.merge_tokens is for inference",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(word) -> None:
    check_refused("digits-dino", word, REFUSED[word])


def test_a_rate_is_not_searched_by_a_loss_that_collapse_lowers(vitascope, tmp_path) -> None:
    answer = vitascope("lr-find", "digits-dino", "--out", str(tmp_path / "x.png"))
    assert answer.code == 2 and "its loss also falls when the model collapses" in answer.err


def test_mixing_and_a_second_word_on_crops_are_refused() -> None:
    with pytest.raises(UserError, match="cutmix mixes labels, but train"):
        complete_augmentation_for_objective(AugmentConfig(cutmix=1.0), "cifar10", 3, "dino")
    with pytest.raises(UserError, match=r"with train\.objective=dino: its crops are set by dino\.global"):
        complete_augmentation_for_objective(AugmentConfig(crop_scale=(0.5, 1.0)), "cifar10", 3, "dino")
