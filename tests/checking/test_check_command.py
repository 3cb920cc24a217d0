"""`vitascope check` and `vitascope exercise`: exit codes, JSON, separate process, folders and points."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vitascope.coursework.checker.check import PARTS
from vitascope.coursework.checker.sandbox import check_file_in_sandbox
from vitascope.coursework.checker.sandbox_worker import enter_folder_and_import_file, explain_error
from vitascope.coursework.exercises import EXERCISES

RIGHT = """
import torch

def attention(q, k, v):
    print("hello from the reader")
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
"""
WRONG = RIGHT.replace(" / q.shape[-1] ** 0.5", "")
GRID = """
from torch import nn

class SelfAttention2d(nn.Module):
    def __init__(self, dim, heads=1):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.qkv(x.flatten(2).transpose(1, 2)).view(b, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = (q @ k.transpose(-2, -1) / SCALE ** 0.5).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(b, c, h, w)
"""


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(source: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(source, encoding="utf-8")
        return path

    return write


def test_a_correct_file_exits_with_0_and_a_wrong_file_with_1(vitascope: Callable, write_file: Callable) -> None:
    right = vitascope("check", str(write_file(RIGHT)))
    assert right.code == 0 and "✓ attention (attention): correct" in right.out and not right.err
    wrong = vitascope("check", str(write_file(WRONG)))
    assert wrong.code == 1 and "wrong: missing-scale" in wrong.out
    assert all(text in wrong.out for text in ("First difference:", "expected", "got", "Hint:", "Assumed:"))


def test_json_is_only_json(vitascope: Callable, write_file: Callable) -> None:
    answer = vitascope("check", str(write_file(WRONG)), "--json")
    parts = json.loads(answer.out)["parts"]
    assert answer.code == 1 and [set(part) for part in parts] == [
        {"part", "name", "passed", "mistakes", "hints", "first_difference"}
    ]
    assert parts[0]["part"] == parts[0]["name"] == "attention"
    assert parts[0]["passed"] is False and parts[0]["mistakes"] == ["missing-scale"] and len(parts[0]["hints"]) == 1
    assert parts[0]["first_difference"]["expected"] != parts[0]["first_difference"]["got"]


def test_an_unrecognised_name_needs_a_part(vitascope: Callable, write_file: Callable) -> None:
    path = write_file(
        WRONG.replace("attention(q, k, v)", "g(a, b, c)").replace("q", "a").replace("k.", "b.").replace("@ v", "@ c")
    )
    unknown = vitascope("check", str(path))
    advice = f"It defines: g. To check it, run: vitascope check {path}:g --part attention (other parts: multi-head"
    assert unknown.code == 2 and advice in unknown.err and not unknown.out
    assigned = vitascope("check", str(path), "--part", "attention")
    assert assigned.code == 1 and "missing-scale" in assigned.out and "recognised" not in assigned.out + assigned.err
    assert "It does not define f. It defines: g." in vitascope("check", f"{path}:f").err
    result = vitascope("check", f"{path}:g", "--part", "attention", "--json")
    assert result.code == 1 and json.loads(result.out)["parts"][0]["mistakes"] == ["missing-scale"]
    wrong = vitascope("check", str(path), "--part", "atention")
    assert wrong.code == 2 and "Did you mean attention?" in wrong.err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def attention(q, k, v:\n    pass", "Syntax error in line 1"),
        ("import no_such_library", "It imports no_such_library, which is not installed (line 1)."),
        ("x = 1", "No transformer part was recognised in it."),
        ("import os\nos.abort()", "Loading the file crashed the Python process"),
        (
            "import torch\nx = torch.zeros(2**29)",
            "It needs more than 1 GiB of memory (line 2). Increase the limit with --memory.",
        ),
        ("def attention(q, k, v):\n    while True:\n        pass", "attention did not finish within 2 seconds"),
    ],
)
def test_an_unusable_file_exits_with_2_and_the_reason(
    vitascope: Callable, write_file: Callable, source: str, message: str
) -> None:
    answer = vitascope("check", str(write_file(source)), "--seconds", "2", "--memory", "1")
    assert answer.code == 2 and message in answer.err and answer.out == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "It raised ZeroDivisionError: division by zero (line 1)."),
        ("import sys\nsys.exit(0)", "It exits the program, e.g. with sys.exit() (line 2)."),
        ("raise MemoryError", "It needs more than 4 GiB of memory (line 1). Increase the limit with --memory."),
        ("x = 1\nraise KeyboardInterrupt", "It raised KeyboardInterrupt (line 2)."),
    ],
)
def test_every_import_error_is_explained(
    write_file: Callable, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path.cwd())
    monkeypatch.syspath_prepend("")
    path = write_file(source)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        enter_folder_and_import_file(path)
    assert explain_error(raised.value, path, 4.0) == message


def test_reports_before_an_infinite_loop_are_kept(write_file: Callable) -> None:
    path = write_file(WRONG + "\ndef multi_head_attention(x, w_q, w_k, w_v, w_o, heads):\n    while True: pass\n")
    reports = check_file_in_sandbox(path, time_limit_seconds=2)
    assert [part.mistakes for part in reports.part_reports] == [["missing-scale"]]
    assert reports.exit_code == 2 and "multi_head_attention did not finish" in str(reports.error)


def test_json_of_an_unusable_file_is_json(vitascope: Callable, write_file: Callable) -> None:
    answer = vitascope("check", str(write_file("def f(:")), "--json")
    assert answer.code == 2 and json.loads(answer.out)["parts"] == [] and "Syntax" in json.loads(answer.out)["error"]


def test_numbers_that_are_not_finite_are_still_json(write_file: Callable) -> None:
    source = "import torch\ndef attention(q, k, v):\n    return v * torch.nan"
    result = check_file_in_sandbox(write_file(source)).to_json_summary()
    assert json.loads(json.dumps(result, allow_nan=False))["parts"][0]["first_difference"]["got"] == "nan"


def test_a_missing_file_and_no_file_exit_with_2(vitascope: Callable, tmp_path: Path) -> None:
    assert "There is no file" in vitascope("check", str(tmp_path / "none.py")).err
    assert vitascope("check").code == 2 and vitascope("check", "--all", str(tmp_path)).code == 2


def test_a_function_that_raises_is_wrong_and_the_error_is_reported(write_file: Callable) -> None:
    reports = check_file_in_sandbox(write_file("def attention(q, k, v):\n    return q @ k"))
    assert reports.exit_code == 1 and reports.part_reports[0].mistakes == ["unknown"]
    assert "It raised an error for every input. RuntimeError" in reports.part_reports[0].evidence[0]


def test_a_mask_must_agree_with_the_causal_mask_of_the_file(write_file: Callable) -> None:
    sees = "def causal_mask(n):\n    return torch.ones(n, n).tril().bool()\n"
    blocks = "def causal_mask(n):\n    return torch.ones(n, n).triu(1).bool()\n"
    hides = """
import torch

def attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(mask, -1e9)).softmax(-1) @ v

"""
    files = ((hides, "one.py"), (hides + sees, "two.py"), (hides + blocks, "three.py"))
    alone, inverted, right = (check_file_in_sandbox(write_file(text, name)) for text, name in files)
    assert alone.part_reports[0].mistakes == ["mask-inverted"]  # by default, True means that attention is allowed
    assert [part.mistakes for part in inverted.part_reports] == [["mask-inverted"], []]
    assert right.passed


def test_the_example_shows_the_inputs_and_outputs_of_the_code(write_file: Callable) -> None:
    rows = "import torch\ndef attention(q, k, v):\n    return (q @ k.mT).softmax(0) @ v\n"
    columns = "import torch\ndef attention(q, k, v):\n    return v @ (q.mT @ k).softmax(-1).mT\n"

    def read_example(source: str) -> tuple[list[torch.Tensor], list[str]]:
        """Return q, k, v, expected and got, and the assumptions."""
        report = check_file_in_sandbox(write_file(source)).part_reports[0]
        return [
            torch.tensor(json.loads(line[line.index("[") :])).float() for line in report.example[1:]
        ], report.assumptions

    tensors, assumptions = read_example(rows)
    assert {tensor.ndim for tensor in tensors} == {3} and "q, k and v have shape batch × token × feature" in assumptions
    (q, k, v, _, got), assumptions = read_example(columns)
    assert "q, k and v have shape batch × feature × token" in assumptions
    assert torch.allclose(v @ (q.mT @ k).softmax(-1).mT, got, atol=1e-3)


def test_the_expected_mask_has_the_convention_of_the_code(write_file: Callable) -> None:
    source = "import torch\ndef causal_mask(n):\n    return torch.triu(torch.full((n, n), -10000.0))\n"
    report = check_file_in_sandbox(write_file(source)).part_reports[0]  # the diagonal is masked out, too
    assert report.mistakes == ["unknown"] and "the mask is additive: it is added to the scores" in report.assumptions
    assert report.example[-2:] == ["expected [[0, -10000], [0, 0]]", "got      [[-10000, -10000], [0, -10000]]"]
    assert report.first_difference["expected"] == 0


def test_a_folder_is_graded_with_sheet_e_s_points(vitascope: Callable, write_file: Callable, tmp_path: Path) -> None:
    write_file(GRID.replace("SCALE", "(c // self.heads)"), "anna.py")
    write_file(GRID.replace("SCALE", "c"), "ben.py")
    write_file("def broken(:", "cem.py")
    write_file("EPOCHS = 10", "train.py")  # nothing to check: not counted as a failure
    answer = vitascope("check", "--all", str(tmp_path), "--json")
    files = {one["file"]: one for one in json.loads(answer.out)["files"]}
    assert answer.code == 2
    assert {name: one["points"] for name, one in files.items()} == {
        "anna.py": 6,
        "ben.py": 4,
        "cem.py": 0,
        "train.py": 0,
    }
    assert "Syntax error" in files["cem.py"]["error"]
    (tmp_path / "anna.py").unlink()
    (tmp_path / "cem.py").unlink()
    write_file(RIGHT, "dora.py")  # correct, but no part of sheet E
    result = vitascope("check", "--all", str(tmp_path))
    assert (
        result.code == 1
        and "4 of 6 (sheet E: 14)" in " ".join(result.out.replace("│", " ").split())
        and "scale-by-width" in result.out
        and "cannot be checked here" in result.out
    )
    assert "0 of " not in result.out and "–" in next(line for line in result.out.splitlines() if "dora.py" in line)


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_starts_unfilled_and_its_parts_are_recognised(
    name: str, vitascope: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "exercise.py"
    answer = vitascope("exercise", "start", name, "--out", str(path))
    assert answer.code == 0 and "..." in path.read_text() and "vitascope check exercise.py" in path.read_text()
    assert vitascope("exercise", "start", name, "--out", str(path)).code == 2  # never overwritten
    if name in ("attention", "sheet-e"):
        reports = check_file_in_sandbox(path)
        assert reports.exit_code == 1 and len(reports.part_reports) == (1 if name == "attention" else 5)


def test_exercises_are_listed(vitascope: Callable) -> None:
    answer = vitascope("exercise", "list")
    assert answer.code == 0 and all(part in answer.out for part in PARTS) and "sheet-e" in answer.out
    assert "Did you mean patchify?" in vitascope("exercise", "start", "patchfy").err


def test_an_unfilled_skeleton_is_not_called_wrong(vitascope: Callable, write_file: Callable) -> None:
    path = write_file("def attention(q, k, v, mask=None):\n    scores = q[..., None]\n    ...\n")
    answer = vitascope("check", str(path))
    assert answer.code == 1 and "not filled in yet" in answer.out and "wrong" not in answer.out
    assert "  Line 3 still contains `...`." in answer.out  # the dots of an index are code
    assert json.loads(vitascope("check", str(path), "--json").out)["parts"][0]["passed"] is False
    assert "not filled in yet" in vitascope("check", "--all", str(path.parent)).out


def test_common_student_code_is_recognised(write_file: Callable) -> None:
    """A base called n, q next to a packed kv, h heads, position-wise layers, and an instance in the file."""
    text = """
import torch
from torch import nn

def positional_encoding(seq_len, d, n=10000):
    place = torch.arange(seq_len)[:, None] / n ** (torch.arange(0, d, 2) / d)
    return torch.stack([place.sin(), place.cos()], -1).flatten(1)

class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())

class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.to_q, self.to_kv = heads, nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_q(x), *self.to_kv(x).chunk(2, -1)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        maps = (q @ k.mT / (d // self.heads) ** 0.5).softmax(-1)
        return self.proj((maps @ v).transpose(1, 2).reshape(b, n, d))

def mha(x, Wq, Wk, Wv, Wo, h):
    b, n, d = x.shape
    q, k, v = ((x @ w.T).view(b, n, h, -1).transpose(1, 2) for w in (Wq, Wk, Wv))
    return ((q @ k.mT / (d // h) ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, n, d) @ Wo.T

layer = SelfAttention(12, 3)
"""
    path = write_file(text)
    reports = check_file_in_sandbox(path)
    assert [(part.part, part.passed) for part in reports.part_reports] == [
        ("sinusoidal-positions", True),
        ("feed-forward", True),
        ("multi-head-attention", True),
        ("multi-head-attention", True),
    ]
    assert check_file_in_sandbox(path, "layer").passed
    joined = write_file(text.replace("(maps @ v).transpose(1, 2)", "(maps @ v)"), "joined.py")
    assert [part.mistakes for part in check_file_in_sandbox(joined, "SelfAttention").part_reports] == [
        ["heads-joined-wrongly"]
    ]


def test_hidden_folders_are_skipped_and_missing_files_reported(
    vitascope: Callable, write_file: Callable, tmp_path: Path
) -> None:
    write_file("def attention(q, k, v):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v\n")
    hidden = tmp_path / ".ipynb_checkpoints"
    hidden.mkdir()
    (hidden / "copy.py").write_text("def broken(:")
    assert vitascope("check", "--all", str(tmp_path)).code == 0  # the copy is not graded
    assert f"run: vitascope check --all {tmp_path}" in vitascope("check", str(tmp_path)).err
    answer = vitascope("check", "nowhere.py", "--json")
    assert answer.code == 2 and json.loads(answer.out) == {"parts": [], "error": "There is no file nowhere.py."}
