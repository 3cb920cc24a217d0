"""A tiny model and every setting that can be combined with it."""

from hypothesis import strategies as st

from vitascope import ModelConfig
from vitascope.model.config import ATTENTIONS, GLOBAL_POOLS, INITIALIZERS, MLPS, NORMS, POSITIONS, TOKENIZERS

TINY = ModelConfig(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, init_values=0.5)

settings = st.fixed_dictionaries(
    {
        "img_size": st.sampled_from([8, (4, 12), (12, 8)]),
        "in_chans": st.sampled_from([1, 3]),
        "tokenizer": st.sampled_from(TOKENIZERS),
        "attention": st.sampled_from(ATTENTIONS),
        "num_classes": st.sampled_from([0, 3]),
        "global_pool": st.sampled_from(GLOBAL_POOLS),
        "class_token": st.booleans(),
        "reg_tokens": st.integers(0, 2),
        "no_embed_class": st.booleans(),
        "positions": st.sampled_from(POSITIONS),
        "norm": st.sampled_from(NORMS),
        "mlp": st.sampled_from(MLPS),
        "qk_norm": st.booleans(),
        "causal": st.booleans(),
        "output_projection": st.booleans(),
        "init_values": st.sampled_from([None, 0.1]),
        "grad_checkpointing": st.booleans(),
        "initialize": st.sampled_from(INITIALIZERS),
    }
)
