"""A classifier is not changed by its calls, and threads that share it get the same results as serial calls."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from tests.training.tiny import shared_run
from vitascope import Classifier, UserError, VisionTransformer, open_model
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.explain import attention_maps
from vitascope.inference import fast
from vitascope.model.precision import disable_tf32

STORED = open_builtin_digits().load_split("test").images[:12]


def save_timm(folder: Path, name: str, **settings) -> str:
    save_for_hf(timm.create_model(name, **settings), folder, model_args=settings)
    return str(folder)


def use_number_format(monkeypatch: pytest.MonkeyPatch, number_format: str) -> None:
    monkeypatch.setattr(fast, "measure_inference_speedup", lambda name, *_: 2.0 * (name == number_format))
    monkeypatch.setattr(fast, "MAX_ACCURACY_LOSS_POINTS", 100.0)


def open_variant(variant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Classifier:
    if variant == "cnn":
        return open_model(save_timm(folder / "cnn", "test_resnet", num_classes=10, in_chans=1))
    if variant == "distilled":
        sizes = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 48, "depth": 2, "num_heads": 3}
        return open_model(save_timm(folder / "vit", "deit_tiny_distilled_patch16_224", num_classes=10, **sizes))
    run = shared_run(folder)
    if variant in ("int8", "bfloat16"):
        use_number_format(monkeypatch, variant)
        classifier = open_model(run, fast=True)
        assert classifier.fast is not None and classifier.fast.description.startswith(variant)
        return classifier
    return open_model(run, merge_tokens=2) if variant == "merged" else open_model(run)


def list_calls(classifier: Classifier, folder: Path) -> list[Callable[[], Any]]:
    """Every method with paths, Pillow images, arrays and tensors, in batches of different sizes."""
    paths = [folder / f"{index}.png" for index in range(3)]
    for path, image in zip(paths, STORED, strict=False):
        Image.fromarray(image[0].numpy()).resize((30, 20)).save(path)
    pillow = [Image.open(path).copy() for path in paths]
    inputs = [str(paths[0]), paths, pillow, np.stack([np.asarray(image) for image in pillow]), STORED[3:4], STORED]
    methods: list[Callable[[Any], Any]] = [
        lambda images: [list(item.probabilities.values()) for item in classifier.predict(images)],
        classifier.features,
    ]
    if isinstance(classifier.model, VisionTransformer):
        methods.append(lambda images: classifier.with_token_reduction(merge_tokens=0, drop_tokens=3).features(images))
    if type(classifier.model).__name__ != "ResNet":
        methods += [classifier.attention_maps, classifier.hidden_states]
    prepared = classifier.preprocessing(STORED)
    calls: list[Callable[[], Any]] = [lambda f=f, x=x: f(x) for x in inputs for f in methods]
    calls += [lambda: classifier(prepared[:5]).detach(), torch.no_grad()(lambda: classifier(prepared))]
    return [*calls, lambda: classifier.compute_logits_of_stored_images(STORED, views=10)]


def describe_state(classifier: Classifier) -> list[Any]:
    """Everything that a call could leave changed: flags, hooks and attributes of modules, weights, PyTorch's flags."""
    modules: list[Any] = [
        (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in classifier.model.named_modules()
    ]
    attributes = [
        sorted((key, value) for key, value in vars(module).items() if isinstance(value, bool | int | float | str))
        for module in classifier.model.modules()
    ]
    weights = [
        (name, weight._version, weight.requires_grad, weight.grad)
        for name, weight in classifier.model.named_parameters()
    ]
    backends = torch.backends
    flags = [
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        *(torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        *(backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark),
        *(backends.cudnn.deterministic, backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()),
        torch.get_rng_state().tolist(),
    ]
    return [modules, attributes, weights, flags]


def are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return first == second


VARIANTS = ["float32", "merged", "int8", "bfloat16", "cnn", "distilled"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_threads_get_bit_equal_results_and_change_nothing(variant, tmp_path, monkeypatch) -> None:
    classifier = open_variant(variant, tmp_path, monkeypatch)
    calls = list_calls(classifier, tmp_path)
    before = describe_state(classifier)
    serial = [call() for call in calls]
    order = torch.randperm(2 * len(calls), generator=torch.Generator().manual_seed(0)).tolist()
    with ThreadPoolExecutor(8) as pool:
        threaded = dict(zip(order, pool.map(lambda index: calls[index % len(calls)](), order), strict=True))
    for index, result in threaded.items():
        assert are_equal(result, serial[index % len(calls)])
    assert describe_state(classifier) == before


def test_opening_a_model_leaves_the_random_state(tmp_path) -> None:
    run = shared_run(tmp_path)
    state = torch.get_rng_state()
    open_model(run)
    assert torch.equal(torch.get_rng_state(), state)


def test_overlapping_contexts_restore_tf32() -> None:
    """The second context ends after the first, as in two threads."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        first, second = disable_tf32(), disable_tf32()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not matmul.allow_tf32 and not cudnn.allow_tf32
        second.__exit__(None, None, None)
        assert matmul.allow_tf32 and cudnn.allow_tf32
    finally:
        matmul.allow_tf32 = before


def test_a_classifier_is_immutable_and_its_weights_have_no_gradients(tmp_path) -> None:
    classifier = open_model(shared_run(tmp_path))
    with pytest.raises(FrozenInstanceError):
        classifier.fast = None  # pyright: ignore
    assert not any(weight.requires_grad for weight in classifier.model.parameters())
    images = classifier.preprocessing(STORED[:2]).requires_grad_()
    classifier(images).sum().backward()
    assert images.grad is not None and images.grad.abs().sum() > 0


def test_maps_and_hidden_states_are_those_of_the_prepared_images(tmp_path) -> None:
    classifier = open_model(shared_run(tmp_path))
    model, prepared = classifier.model, classifier.preprocessing(STORED)
    assert isinstance(model, VisionTransformer)
    maps, states = classifier.attention_maps(STORED), classifier.hidden_states(STORED)
    assert all(map(torch.equal, maps, attention_maps(model, prepared)))
    with torch.no_grad():
        tokens = model.embed(prepared)
        assert len(states) == 1 + len(model.blocks) and torch.equal(states[0], tokens)
        torch.testing.assert_close(model.forward_head(model.norm(states[-1])), model(prepared))
    for state, block, seen in zip(states, model.blocks, maps, strict=False):
        with torch.no_grad():
            expected = block.attn.maps(block.norm1(state), rotation=model.rotation)  # pyright: ignore
        torch.testing.assert_close(seen, expected)


def test_a_classifier_with_fewer_tokens_shares_its_weights_and_has_maps_of_all_tokens(tmp_path) -> None:
    whole = open_model(shared_run(tmp_path))
    merged = whole.with_token_reduction(merge_tokens=2)
    assert merged.model is not whole.model and whole.config.merge_tokens == 0 and merged.config.merge_tokens == 2
    assert [id(weight) for weight in merged.model.parameters()] == [id(weight) for weight in whole.model.parameters()]
    assert merged.weights_label == "last, merge_tokens=2" and merged.info == replace(whole.info, model=merged.config)
    maps, states = merged.attention_maps(STORED[:2]), merged.hidden_states(STORED[:2])
    assert [part.shape for part in maps] == [part.shape for part in whole.attention_maps(STORED[:2])]
    assert [part.shape for part in states] == [part.shape for part in whole.hidden_states(STORED[:2])]
    assert not torch.equal(states[-1], whole.hidden_states(STORED[:2])[-1])
    for part in maps:
        torch.testing.assert_close(part.sum(-1), torch.ones(part.shape[:-1]))
    assert torch.equal(
        merged.with_token_reduction(merge_tokens=0).attention_maps(STORED[:2])[0], whole.attention_maps(STORED[:2])[0]
    )


def test_a_model_in_training_mode_is_refused(tmp_path) -> None:
    classifier = open_model(shared_run(tmp_path))
    classifier.model.train()
    for call in (classifier.predict, classifier.features, classifier.attention_maps):
        with pytest.raises(UserError, match="training mode"):
            call(STORED[:2])
