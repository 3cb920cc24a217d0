"""Sheet D's ten questions, answered from what was measured."""

from vitascope.sheets.lab import percent
from vitascope.sheets.writing import Report
from vitascope.study.answer import Answer

CLAIMS = {"width": "32", "patch": "14", "depth": "6"}
EQUATIONS = {
    "2. Single-head attention.": ("Q = X W_Q, K = X W_K, V = X W_V; A = softmax(Q Kᵀ / √d_k), row by row; output A V."),
    "3. Multi-head attention.": """For each head h: A_h = softmax(Q_h K_hᵀ / √(d/H)), O_h = A_h V_h, where Q_h, K_h, V_h
        are the head's d/H columns; output [O_1 … O_H] W_O + b_O.""",
    "4. The block.": "y = x + MHA(LN(x)); z = y + W_2 GELU(W_1 LN(y) + b_1) + b_2, where W_1 has mlp_ratio · d rows.",
    "5. The class token.": """A learned vector put in front of the patches; it belongs to no patch, gathers from all of
        them in every block, and the head reads its last state. Averaging the patches' last states instead works as
        well.""",
    "6. The position embedding.": """Attention does not know order: permuted tokens give permuted outputs. Sines and
        cosines of falling frequency are added to the tokens, so every place has its own pattern, and a shift is a
        rotation of the pairs. The table above is computed, so it extends to longer sequences; that a model trained on
        short ones then answers well is another matter, which drawing the table does not show.""",
}
NAMES = {"width": "embed_dim", "patch": "patch size", "depth": "blocks"}


def answers(
    report: Report,
    found: dict[str, Answer],
    costs: dict[str, dict[str, float]],
    gains: dict[str, tuple[float, float | None, str]],
) -> None:
    report.heading("The questions")
    out, fused = costs["written out"], costs["fused"]
    report.asked(
        "1. Self-attention against convolution, and its challenge.",
        f"""A convolution mixes a fixed neighbourhood with the same weights everywhere; attention mixes all tokens with
        weights computed from them. It needs more data, because locality and translation are not built in, and its maps
        grow with the square of the tokens: measured above, written out, time tokens^{out["time"]:.2f} and memory
        tokens^{out["memory"]:.2f}; fused, memory tokens^{fused["memory"]:.2f}.""",
    )
    for question, answer in EQUATIONS.items():
        report.asked(question, answer)
    report.asked("7. The studies.", " ".join(_claim(name, one) for name, one in found.items()))
    report.asked(
        "8. Complexity in tokens, and how to improve it.",
        """N² d for the maps and N d² for the projections; memory N² written out, N fused (above). Better: a fused
        kernel (same result), fewer tokens (larger patches, or merging and dropping similar ones: `--merge-tokens`,
        `--drop-tokens`), attention in windows, low-rank or kernel approximations. Fused attention and fewer tokens are
        built in, and measured in docs/small-data.md.""",
    )
    report.asked(
        "9. The 28 × 28 problem, and do CNNs have it?",
        """See above: the table of positions and the size check, not attention. A CNN with global pooling accepts the
        image, but its resolution was chosen for 224 pixels as well, so it sees little.""",
    )
    told = "; ".join(f"{name} {100 * points:+.2f} points ({verdict})" for name, (points, _, verdict) in gains.items())
    report.asked(
        "10. Ideas for small data sets.",
        f"""Measured above on a thousand images: {told}. DINO (self-distillation with no labels: a student learns what
        its own average says of other crops; the name is not DeiT's, and nothing is masked) and MAE (most patches hidden
        and painted) learn from the same images without labels first: `vitascope train cifar10-dino`, and
        docs/without-labels.md for when it pays. Weights from larger data are the strongest help where they may be
        used.""",
    )


def _claim(name: str, found: Answer) -> str:
    """Whether the sheet's favourite is the best here."""
    claimed = next((cell for cell in found.cells if next(iter(cell.settings.values())) == CLAIMS[name]), None)
    best = found.best
    if claimed is None:
        return f"{NAMES[name]}: {found.sentence}"
    if claimed is best:
        rest = "and every other value is worse" if not found.as_good else "but others cannot be told from it"
        return f"{NAMES[name]}: the sheet's {CLAIMS[name]} is the best here too ({percent(claimed)}), {rest}."
    other = found.against_best(claimed)
    if other is not None and other.verdict == "worse":
        return (
            f"{NAMES[name]}: the sheet's {CLAIMS[name]} ({percent(claimed)}) is not the best: {best.name} reaches "
            f"{percent(best)}, beyond the seeds' noise."
        )
    return (
        f"{NAMES[name]}: the sheet's {CLAIMS[name]} ({percent(claimed)}) cannot be told from the best, {best.name} "
        f"({percent(best)})."
    )
