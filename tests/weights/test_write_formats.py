"""What transformers' ViT does not have is refused by name, one by one."""

import pytest

from vitascope import ModelConfig, UserError
from vitascope.weights.write_formats import check_transformers_support

PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"global_pool": "avg"}, "global_pool=avg"),
        ({"reg_tokens": 1}, "registers"),
        ({"positions": "rotary"}, "positions=rotary"),
        ({"no_embed_class": True}, "positions=learned"),
        ({"norm": "rmsnorm"}, "norm=rmsnorm"),
        ({"mlp": "relu2"}, "mlp=relu2"),
        ({"qk_norm": True}, "QK-norm"),
        ({"init_values": 0.1}, "LayerScale"),
        ({"output_projection": False}, "output_projection=false"),
        ({"proj_bias": False}, "proj_bias=false"),
        ({"num_classes": 0}, "a model without classifier"),
        ({"img_size": (32, 64)}, "non-square images or patches"),
        ({"img_size": (32, 64), "patch_size": (8, 16)}, "non-square images or patches"),
        ({"tokenizer": "spt"}, "tokenizer=spt"),
        ({"attention": "lsa"}, "attention=lsa"),
        ({"merge_tokens": 1}, "merge_tokens=1"),
        ({"drop_tokens": 1}, "drop_tokens=1"),
        ({"causal": True, "global_pool": "avg"}, "causal attention"),
    ],
    ids=str,
)
def test_settings_that_transformers_lacks_are_named(settings, named) -> None:
    check_transformers_support(ModelConfig(**PLAIN))
    with pytest.raises(UserError, match=f"transformers' ViT does not support .*{named}"):
        check_transformers_support(ModelConfig(**(PLAIN | settings)))
