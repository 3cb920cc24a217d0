"""Sheet B: shapes through attention, and curves at three lengths."""

import torch

from vitascope.model.attention import SelfAttention
from vitascope.sheets.lab import Lab, percent
from vitascope.sheets.writing import Report
from vitascope.study.report import bands

TITLE = "shapes through attention, and curves at three lengths"
FULL = ["train.epochs=10,30,50"]
SMALL = ["data.fraction=0.1", "model.embed_dim=64", "model.depth=3", "model.num_heads=4"]  # for a CPU, with --quick
SMALL += ["train.batch_size=64", "train.lr=1e-3"]
QUICK = ["train.epochs=1,3,5", *SMALL]


def run(lab: Lab, report: Report) -> None:
    _shapes(report)
    found = lab.study("epochs", "sheet-c", QUICK if lab.quick else FULL, judge="test")
    report.heading("Curves at three lengths")
    report.text(
        """The sheet names no data; these are three runs on CIFAR-10 with sheet C's model, each with a rate that falls
        to zero at its own end. The curves are of images held back from training; the accuracy is that of the test
        images, looked at once."""
    )
    report.picture(
        "curves", bands(found, {cell.name: f"{cell.settings['train.epochs']} epochs" for cell in found.cells})
    )
    head = ["epochs", "test accuracy", "training accuracy", "training loss", "held-back loss", "seconds a run"]
    rows = []
    for cell in found.cells:
        numbers = [cell.last(name) or 0.0 for name in ("train_accuracy", "train_loss", "val_loss")]
        told = [f"{100 * numbers[0]:.1f} %", f"{numbers[1]:.3f}", f"{numbers[2]:.3f}", f"{cell.number('seconds'):.0f}"]
        rows.append([cell.settings["train.epochs"], percent(cell), *told])
    report.table(head, rows)
    report.text(found.sentence)
    report.numbers |= {"accuracy": {cell.settings["train.epochs"]: cell.accuracies for cell in found.cells}}
    _answers(report)


def _shapes(report: Report) -> None:
    torch.manual_seed(0)
    columns, weights = torch.randn(768, 6), torch.randn(3, 768, 768) * 768**-0.5
    query, key, value = (weight @ columns for weight in weights)
    maps = (key.T @ query / 768**0.5).softmax(0)  # over the keys, which are rows here
    output = value @ maps
    wrong = query @ key.T
    report.heading("Shapes: X of 768 × 6, tokens as columns")
    report.table(
        ["tensor", "the sheet", "computed here"],
        [
            ["Q, K, V = W X", "768 × 6", _of(query)],
            ["map", "Q Kᵀ: 768 × 768", f"softmax(Kᵀ Q / √768): {_of(maps)}"],
            ["output", "768 × 6", f"V · map: {_of(output)}"],
        ],
    )
    report.text(
        f"""The sheet multiplies Q Kᵀ, which with tokens as columns is {_of(wrong)}: it compares features with
        features, not tokens with tokens, and its size does not depend on the number of tokens. With tokens as columns
        a score is a product of two columns, Kᵀ Q, and the softmax runs over the keys, down each column (the columns
        above sum to {maps.sum(0).min():.4f} to {maps.sum(0).max():.4f})."""
    )
    tokens = torch.randn(1, 5, 768)
    layer = SelfAttention(768, 12).eval()
    with torch.no_grad():
        packed = layer.qkv(tokens)[..., :768].reshape(1, 5, 12, 64)
        heads = layer.maps(tokens)
        _, _, values = layer.queries_keys_values(tokens)
        gathered = (heads @ values).transpose(1, 2)
        joined = layer(tokens)
    report.table(
        ["multi-head attention, 12 heads", "the sheet", "computed here"],
        [
            ["tokens", "1 × 5 × 768", _of(tokens)],
            ["queries, keys, values per head", "1 × 5 × 12 × 64", _of(packed)],
            ["maps", "1 × 12 × 5 × 5", _of(heads)],
            ["the heads' outputs", "1 × 5 × 12 × 64", _of(gathered)],
            ["joined and projected", "1 × 5 × 768", _of(joined)],
        ],
    )
    highest = (heads[0].argmax(-1) == torch.arange(5)).float().mean()
    report.text(
        f"""In this layer with fresh weights a token's own position gets the highest weight in {highest:.0%} of the
        rows: the sheet's remark that it always does is not a law; the weights decide, and nothing prefers the
        diagonal."""
    )


def _of(tensor: torch.Tensor) -> str:
    return " × ".join(map(str, tensor.shape))


def _answers(report: Report) -> None:
    report.heading("The questions")
    report.asked(
        "How is self-attention computed, in five steps?",
        """1. Project every token to a query, a key and a value. 2. Multiply every query with every key.
        3. Divide by the root of the key width. 4. Softmax over the keys, so that every query's weights sum to 1.
        5. Average the values with these weights.""",
    )
    report.asked(
        "Name three uses.",
        """Language (translation, language models), vision (classification as here, detection, segmentation), generative
        models (text, and images by diffusion transformers).""",
    )
    report.asked(
        "Name four advantages over CNNs.",
        """Global context: every token can reach every other in the first block, where a 3 × 3 convolution sees its
        neighbours. Input sizes: attention takes any number of tokens (see below for what does not). Informative
        regions: the weights depend on the image, a convolution's are the same everywhere. Parallel computation: all
        pairs at once; but so are a convolution's positions: convolutions are not sequential, recurrent networks
        are.""",
    )
    report.asked(
        "Do transformers take any input size, and CNNs not?",
        """B says yes, D the opposite. Measured in our tests: attention and the blocks run on any number of tokens; a
        learned position table and a size check do not, and have to be resampled (`vitascope adapt`); rotary and
        sinusoidal positions are computed for any size. A CNN's convolutions take any size as well, and with global
        pooling before the classifier so does the whole network; with a flattened last map it does not. So neither is
        a property of attention or of convolution, but of how positions and the head are built.""",
    )
