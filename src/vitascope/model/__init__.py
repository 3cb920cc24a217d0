"""Images -> Logits: the vision transformer, part by part.

Read in this order: `config` (what can be set), `vit` (the whole), `patches`, `tokens`, `block`, `attention`, `mlp`,
`head`. Beside them: `scaled_dot_product` (attention as a plain function), `masks`, `positions`, `rotary`,
`initialize`, `anatomy` (shapes and costs without running anything).
"""
