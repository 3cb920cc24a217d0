"""Scoring: without chance, for any batch size, leaving the model as it was."""

import pytest
import torch

from tests.training.test_runs import build_state_and_run
from vitascope import UserError
from vitascope.inference.scoring import compute_logits, score_model, set_eval_mode_temporarily


def test_scoring_is_free_of_dropout_and_of_the_batch_size_and_leaves_the_mode(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **{"model.drop_path_rate": 0.5, "model.proj_drop_rate": 0.5})
    data, hardware = state.data, state.hardware
    model = state.model.train()
    with pytest.raises(UserError, match=r"Call model\.eval\(\) first"):
        compute_logits(model, data.validation.images, data.preprocessing, hardware)
    with set_eval_mode_temporarily(model):
        whole = compute_logits(model, data.validation.images, data.preprocessing, hardware)
        parts = compute_logits(model, data.validation.images, data.preprocessing, hardware, batch_size=7)
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=0)
    assert model.training
    score = score_model(model, data.validation, data.preprocessing, hardware)
    right = (whole.argmax(1) == data.validation.labels).float().mean().item()
    assert score.accuracy == pytest.approx(right) and score.num_images == 90
