"""A model with merged or dropped tokens is explained as it predicts; sequence pooling weights the queries."""

import pytest
import torch
from torch import nn

from tests.explain.test_explain import made, pictures
from tests.training.tiny import shared_run
from vitascope import ModelConfig, open_model
from vitascope.data.preprocessing import Preprocessing
from vitascope.explain import METHODS, attention_maps, explain, model_statistics, rollout
from vitascope.explain.attribution import build_attribution_inputs, choose_target_or_predicted_classes
from vitascope.explain.model_figures import compute_head_and_block_statistics
from vitascope.inference.classifier import Classifier
from vitascope.model.replay import make_logits_function_with_fixed_token_groups, replay_forward_pass
from vitascope.run.directory import make_run_for_external_weights

REDUCTIONS = [{"merge_tokens": 3}, {"drop_tokens": 3}]
reductions = pytest.mark.parametrize("reduction", REDUCTIONS, ids=["merge", "drop"])
MAP_METHODS = ["attention", "rollout", "gradient", "relevance"]


@pytest.mark.parametrize("pool", ["token", "avg", "seq"])
def test_merging_equal_patches_changes_no_explanation(pool, monkeypatch) -> None:
    """The full model sees pairs of equal patches; the other model merges each pair in the first block."""
    settings = {"positions": "none", "global_pool": pool}
    full_model, merged_model = made(**settings), made(**settings, merge_tokens=4)
    merged_model.load_state_dict(full_model.state_dict())
    twins = pictures(full_model)
    twins[..., :8, 4:8], twins[..., :8, 12:] = twins[..., :8, :4], twins[..., :8, 8:12]
    expected = [explain(full_model, twins, method, target=2) for method in MAP_METHODS]
    expected_maps = attention_maps(full_model, twins)[0]
    monkeypatch.setattr(ModelConfig, "num_removed_per_block", [4, 0, 0])
    assert [maps.shape[-1] for maps in replay_forward_pass(merged_model, twins).maps] == [17, 13, 13]
    merged = [explain(merged_model, twins, method, target=2) for method in MAP_METHODS]
    torch.testing.assert_close(merged, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(attention_maps(merged_model, twins)[0], expected_maps)


@reductions
@pytest.mark.parametrize("pool", ["token", "avg", "seq"])
def test_rollout_of_the_reduced_model_sums_to_one(pool, reduction) -> None:
    inputs = build_attribution_inputs(made(**reduction, global_pool=pool), pictures(made(**reduction)))
    through = rollout(inputs.maps)
    torch.testing.assert_close(through.sum(-1), torch.ones(3, 17).double())
    torch.testing.assert_close(inputs.average_query_rows(through).sum(-1), torch.ones(3).double())


@reductions
def test_rollout_follows_the_reduced_tokens(reduction) -> None:
    """The same by hand: every token carries what it holds of each patch; merging averages, dropping removes."""
    model = made(**reduction)
    images = pictures(model, 1)
    result = replay_forward_pass(model, images)
    carried = torch.eye(17).double()
    for maps, before, after in zip(result.maps, result.memberships[:-1], result.memberships[1:], strict=True):
        size = maps.shape[-1]
        carried = (maps[0].mean(0) + torch.eye(size)) / 2 @ carried
        contains = after[0] @ before[0].mT  # token after × token before: patches in both
        carried = contains / contains.sum(-1, keepdim=True) @ carried
    torch.testing.assert_close(explain(model, images, "rollout")[0].flatten(), carried[0, 1:])


@reductions
def test_a_reduced_model_is_explained_by_every_method_on_its_own_predictions(reduction) -> None:
    model = made(**reduction, global_pool="avg")
    images = pictures(model, 2)
    heatmaps = {method: explain(model, images, method, target=3) for method in METHODS}
    for method, heatmap in heatmaps.items():
        assert heatmap.shape == (2, 4, 4) and torch.isfinite(heatmap).all()
        assert heatmap.abs().max() > 0 or method == "gradient"  # which may be negative everywhere, so 0
    with torch.no_grad():
        assert torch.equal(choose_target_or_predicted_classes(model, images, None), model(images).argmax(1))
        hidden = images[:1].clone()
        hidden[..., 4:8, 8:12] = 0
        fall = model(images)[0].softmax(0)[3] - model(hidden)[0].softmax(0)[3]
        change = model(images) - make_logits_function_with_fixed_token_groups(model, images)(torch.zeros_like(images))
    assert heatmaps["occlusion"][0, 1, 2].item() == pytest.approx(fall.item(), abs=1e-12)
    torch.testing.assert_close(heatmaps["integrated-gradients"].sum((1, 2)), change[:, 3], rtol=1e-2, atol=5e-3)


def test_a_patch_that_is_dropped_first_has_no_attention_later() -> None:
    model = made(drop_tokens=3)
    images = pictures(model, 1)
    result = replay_forward_pass(model, images)
    dropped = result.memberships[1][0].sum(0) == 0
    assert dropped.sum() == 3
    states = result.expand_hidden_states_to_all_tokens()
    assert torch.equal(states[3][:, dropped], states[0][:, dropped])  # they keep their last state
    assert not torch.allclose(states[1][:, ~dropped], states[0][:, ~dropped])
    heatmap = explain(model, images, "attention")[0].flatten()
    assert (heatmap[dropped[1:]] == 0).all() and (heatmap > 0).sum() == 16 - 6  # the last block sees 10 patches


@reductions
@pytest.mark.parametrize("pool", ["token", "avg", "seq"])
def test_statistics_of_a_reduced_model_end_with_its_prediction(pool, reduction) -> None:
    model = made(**reduction, global_pool=pool)
    images = pictures(model, 8)
    subject = Classifier(
        model,
        make_run_for_external_weights("merged", model.config),
        [],
        Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3),
        (3, 16, 16),
    )
    statistics = compute_head_and_block_statistics(subject, images)
    assert statistics.lens[-1] == 1 and statistics.distance.shape == (3, 2)
    assert (statistics.distance > 0).all() and (statistics.distance < 18**0.5).all()
    states = model_statistics.compute_hidden_states_of_all_tokens(model, images)
    assert {state.shape for state in states} == {(8, 17, 16)}


def test_with_sequence_pooling_the_peaked_token_s_row_is_followed() -> None:
    model = made(class_token=False, global_pool="seq", norm="none")
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1)
    images = pictures(model, 1)
    inputs = build_attribution_inputs(model, images)
    tokens = inputs.maps_and_states.hidden_states[-1]
    with torch.no_grad():  # the score is largest for the patch whose token points in this direction
        direction = tokens[0, 5] - tokens[0].mean(0)
        model.pool.score.weight[0] = 1e4 * direction / direction.norm() ** 2
        chosen = int((tokens[0] @ model.pool.score.weight[0]).argmax())
    through = rollout(attention_maps(model, images))[0]
    heatmap = explain(model, images, "rollout")[0].flatten()
    torch.testing.assert_close(heatmap, through[chosen], atol=1e-6, rtol=0)
    assert not torch.allclose(heatmap, through.mean(0), atol=1e-3)


def test_weights_of_the_pool_are_those_of_the_features() -> None:
    for settings in ({"global_pool": "token"}, {"global_pool": "avg"}, {"global_pool": "seq", "reg_tokens": 2}):
        model = made(**settings)
        images = pictures(model)
        with torch.no_grad():
            result = replay_forward_pass(model, images)
            tokens = model.norm(result.hidden_states[-1])
            pooled = torch.einsum("bt,btf->bf", result.pool_weights, tokens)
            torch.testing.assert_close(pooled, model.pool(tokens))


def test_a_merging_model_is_opened_as_it_predicts(tmp_path) -> None:
    run = shared_run(tmp_path)
    folder = open_model(run.path, merge_tokens=2).save_pretrained(tmp_path / "merging")
    subject = open_model(str(folder))
    assert subject.model.config.token_reduction == {"merge_tokens": 2}
