"""The cost of looking is measured against a forward pass that is one."""

import torch

from benchmarks.looking import measure_attention_map_cost, run_unfused_forward
from tests.explain.test_explain import KINDS, made, pictures


def test_the_unfused_forward_pass_equals_the_model() -> None:
    for settings in KINDS.values():
        model = made(**settings)
        if not model.config.causal:
            images = pictures(model)
            torch.testing.assert_close(run_unfused_forward(model, images), model(images).detach(), atol=1e-10, rtol=0)


def test_the_cost_is_a_ratio() -> None:
    model = made()
    ratios = measure_attention_map_cost(model, pictures(model, 64), num_rounds=3)
    assert len(ratios) == 3 and all(0.1 < ratio < 50 for ratio in ratios)
