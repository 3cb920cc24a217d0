"""The result of checking one part or one file, as text, HTML and JSON, and the descriptions of the known mistakes."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, NotRequired, TypedDict

from vitascope.draw.html import render_template


class Mistake(NamedTuple):
    """A description of a mistake, and a hint where to look."""

    description: str
    hint: str


MISTAKES = {
    "missing-scale": Mistake(
        "Scaling by 1/sqrt(d_k) is missing.",
        "The variance of a dot product grows with the number of features, d_k. How do large scores change the softmax?",
    ),
    "scale-by-width": Mistake(
        "The scores are scaled with the full embedding width instead of the width of one head.",
        "How many products are added up in one dot product of one head?",
    ),
    "scale-not-sqrt": Mistake(
        "The scores are divided by the width instead of its square root.",
        "How does the standard deviation of a dot product grow with the number of features d: like d, or more slowly?",
    ),
    "softmax-over-queries": Mistake(
        "The softmax runs over the queries instead of the keys.",
        "Along which axis does your attention map sum to 1? For each query, its weights over all keys should sum to 1.",
    ),
    "softmax-over-heads": Mistake(
        "The softmax runs over the heads instead of the keys.",
        "Along which axis does your attention map sum to 1? Each head has its own softmax.",
    ),
    "feature-attention": Mistake(
        "Attention is computed between features instead of tokens.",
        "Print the shape of the attention map. It should be tokens × tokens. Which axis does your product sum over?",
    ),
    "weight-not-transposed": Mistake(
        "A weight of shape output × input is used as if its shape were input × output.",
        "What is the shape of nn.Linear(2, 3).weight? Try your product with a matrix that is not square. "
        "If your weights have shape input × output, state this in the docstring.",
    ),
    "heads-not-transposed": Mistake(
        "The features are split into heads, but the head axis is not moved before the token axis.",
        "Print the shapes just before the product of queries and keys. Which two axes does @ multiply?",
    ),
    "heads-joined-wrongly": Mistake(
        "The outputs of the heads are concatenated in the wrong order.",
        "The first features of token 0 should come from head 0 and token 0. Where do yours come from?",
    ),
    "missing-output-projection": Mistake(
        "The output projection is missing.",
        "nn.MultiheadAttention has one more layer after the heads are concatenated. What does it do?",
    ),
    "mask-inverted": Mistake(
        "The mask is inverted: allowed and masked-out tokens are swapped.",
        "Which tokens may the first token attend to? Compare with the first row of your mask or attention map.",
    ),
    "mask-transposed": Mistake(
        "The mask is transposed: it blocks earlier tokens. A causal mask must block later tokens.",
        "Rows are queries, columns are keys. Which tokens may the first token attend to, and which the last one?",
    ),
    "mask-after-softmax": Mistake(
        "The mask is applied after the softmax.",
        "Add up one row of the masked attention map. Is the sum still 1?",
    ),
    "mask-too-small": Mistake(
        "Masked scores get a finite value that is not low enough.",
        "Are the masked weights exactly 0 after the softmax, even if their scores were very high before masking?",
    ),
    "dropout-in-eval": Mistake(
        "The result is random in eval mode: two calls with the same input differ.",
        "Call model.eval(), then call the model twice with the same input. What switches dropout off?",
    ),
    "query-key-swapped": Mistake(
        "Queries and keys are swapped.",
        "Row i of the attention map belongs to token i. Is token i the query or the key in this row?",
    ),
    "missing-residual": Mistake(
        "A residual connection is missing: the unchanged input is not added to the output.",
        "If attention returned only zeros, what should the block return?",
    ),
    "norm-after": Mistake(
        "The norm is applied after the layer (post-norm) instead of before it (pre-norm).",
        "Compare your code with equations 2 and 3 of Dosovitskiy et al. (2021). What is normalised, and what is not?",
    ),
    "missing-norm": Mistake(
        "A norm is missing or not used.",
        "Count the norms that forward() uses. A block has one before attention and one before the MLP. "
        "A ViT has one more before the head.",
    ),
    "class-token-at-end": Mistake(
        "The class token is at the end, or the head reads the last token instead of the first.",
        "At which index is the class token, and which index does the head read?",
    ),
    "position-misplaced": Mistake(
        "The position embeddings are added in the wrong place, shifted, or not added.",
        "Which row of the position embeddings belongs to the class token, and which to the first patch?",
    ),
    "patches-in-column-order": Mistake(
        "The patches are ordered column by column instead of row by row.",
        "Number the pixels of a small image and print patch 1. Is it to the right of patch 0 or below it?",
    ),
    "pixels-interleaved": Mistake(
        "The pixels of a patch do not form one square of the image.",
        "Number the pixels of a small image and print patch 0. Are its pixels neighbours in the image?",
    ),
    "wrong-in-proj-slice": Mistake(
        "The wrong rows of the packed weight are used for queries, keys and values.",
        "in_proj_weight has 3·width rows in the order Q, K, V. How many rows belong to each?",
    ),
    "sin-cos-swapped": Mistake(
        "Sine and cosine are swapped.",
        "Print the values at position 0. Which features are 0 and which are 1?",
    ),
    "wrong-frequency": Mistake(
        "The frequencies of sine and cosine are wrong.",
        "The angle of feature 0 grows by 1 per position. By how much do the angles of the next features grow? "
        "Compare your exponent with the paper.",
    ),
    "unknown": Mistake(
        "At least one check fails, and no combination of one or two known mistakes explains it.",
        "Compute a small example by hand, step by step, and compare it with your code.",
    ),
}


IGNORED_MASK_EVIDENCE = "The mask has no effect on the output."
BOOLEAN_MASK_HINT = (
    "By default, True (or 1) in a mask means that attention is allowed. If yours means the opposite, state this in "
    "the docstring."
)
ADDITIVE_MASK_HINT = "An additive mask is 0 where attention is allowed and -inf where it is blocked."
IGNORED_MASK_HINT = "Where does your code use the mask? Masked scores must be -inf before the softmax."
NOTHING_RECOGNIZED = "No transformer part was recognised in it."
RESULT_SIGNS = {True: "✓", False: "✗", None: "–"}


class FirstDifference(TypedDict):
    """The first difference from the reference; the keys are those of the JSON output."""

    check: str
    index: list[int] | None
    expected: float | str | None
    got: float | str | None
    error: NotRequired[str]


@dataclass
class CheckRow:
    """One line of the table of checks; `passed` is None if it was not checked."""

    check: str
    passed: bool | None
    note: str = ""


@dataclass
class CheckReport:
    """The result of checking one function or class."""

    part: str
    name: str
    passed: bool
    mistakes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    first_difference: FirstDifference | None = None
    assumptions: list[str] = field(default_factory=list)
    table: list[CheckRow] = field(default_factory=list)
    example: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""  # instead of correct or wrong: not filled in yet, could not be checked

    def to_json_summary(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        keys = ("part", "name", "passed", "mistakes", "hints", "first_difference")
        return {key: asdict(self)[key] for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, to be sent to another process."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self.format_headline(), *("  " + line for line in self.format_lines())])

    __repr__ = __str__

    def format_headline(self) -> str:
        wrong = "wrong (cause not recognised)" if self.mistakes == ["unknown"] else f"wrong: {', '.join(self.mistakes)}"
        verdict = self.verdict or ("correct" if self.passed else wrong)
        return f"{RESULT_SIGNS[self.passed]} {self.name} ({self.part}): {verdict}"

    def format_lines(self) -> list[str]:
        """Return the lines below the headline, with the table of checks."""
        width = max((len(row.check) for row in self.table), default=0)
        table = [f"{RESULT_SIGNS[row.passed]} {row.check:<{width}}  {row.note}".rstrip() for row in self.table]
        return self.format_findings() + table

    def format_findings(self) -> list[str]:
        """Return the mistakes, the evidence for them and the hints."""
        ignores_mask = IGNORED_MASK_EVIDENCE in self.evidence
        named = [name for name in self.mistakes if not (self.verdict or (name == "unknown" and ignores_mask))]
        lines = [f"{name}: {MISTAKES[name].description}" for name in named] + self.evidence
        if self.first_difference and not self.verdict:
            lines.append(f"First difference: {format_first_difference(self.first_difference)}")
        if self.example:
            shown = " (the mask has no effect)" if ignores_mask else ""
            lines += [f"Smallest failing example{shown}:", *("  " + line for line in self.example)]
        lines += [f"Hint: {hint}" for hint in self.hints]
        lines += [f"Assumed: {line}" for line in self.assumptions]
        return lines + [f"Note: {line}" for line in self.notes]

    def _repr_html_(self) -> str:
        return _format_reports_for_notebook([self])


@dataclass
class FileReport:
    """The reports of all parts of one file; `error` gives the reason why it could not be checked."""

    part_reports: list[CheckReport] = field(default_factory=list)
    error: str | None = None
    unrecognized_names: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.part_reports) and all(part.passed for part in self.part_reports)

    @property
    def is_empty(self) -> bool:
        """Return whether the file runs but contains nothing to check."""
        return self.error is not None and self.error.startswith(NOTHING_RECOGNIZED)

    @property
    def exit_code(self) -> int:
        """0: everything is correct; 1: a mistake was found; 2: the file could not be checked."""
        return 2 if self.error is not None or not self.part_reports else int(not self.passed)

    def to_json_summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {"parts": [part.to_json_summary() for part in self.part_reports]}
        summary |= {"passed_over": self.unrecognized_names} if self.unrecognized_names else {}
        return summary if self.error is None else summary | {"error": self.error}

    def __str__(self) -> str:
        paragraphs = [str(part) for part in self.part_reports]
        paragraphs += [] if self.error is None else [f"The file could not be checked. {self.error}"]
        return "\n\n".join(paragraphs)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _format_reports_for_notebook(self.part_reports, self.error)


def _format_reports_for_notebook(reports: list[CheckReport], error: str | None = None) -> str:
    return render_template("check_report.html.j2", reports=reports, signs=RESULT_SIGNS, error=error)


def build_report_from_dict(report_fields: dict[str, Any]) -> CheckReport:
    """Create a report from the fields that `CheckReport.to_dict` returns."""
    rows = [CheckRow(**row) for row in report_fields["table"]]
    return CheckReport(**{name: value for name, value in report_fields.items() if name != "table"}, table=rows)


def format_first_difference(first_difference: FirstDifference) -> str:
    """Describe a `first_difference` in one line."""
    if "error" in first_difference:
        return f"{first_difference['check']}: raised {first_difference['error']}"
    if first_difference["index"] is None:
        return f"{first_difference['check']}: expected {first_difference['expected']}, got {first_difference['got']}"
    index = ", ".join(map(str, first_difference["index"]))
    expected, got = (
        value if isinstance(value, str) else f"{value:.6g}"
        for value in (first_difference["expected"], first_difference["got"])
    )
    return f"{first_difference['check']}, output[{index}]: expected {expected}, got {got}"
