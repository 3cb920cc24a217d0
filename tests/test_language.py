"""Texts and names use the field's words: banned words and bare participles are rejected."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = sorted((ROOT / "src").rglob("*.py"))
CODE = [*PYTHON, *sorted((ROOT / "benchmarks").rglob("*.py"))]
PAGES = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".js", ".j2", ".txt"))
# Personification, metaphors and words with a private meaning; docs/glossary.md has the terms to use instead.
BANNED = re.compile(
    r"\b(nobody|whoever|somebody|told|crowd|spoilt|bend|by turns|by chance|by heart|be told|go(es)? on with|"
    r"as if it had not|learn(t|s)? together|in company|how sure|too (un)?sure|surer|passed over|worked off|says so|"
    r"answers? rightly|on the way|the reader|want a word)\b",
    re.IGNORECASE,
)
# Function names that are no imperative: participles ("settled", "_shown"), adverbs ("quietly"), gerunds ("judging").
PARTICIPLE = re.compile(
    r"_?[a-z]+(ed|[^h]en|ing|ly)|_?(told|said|found|shown|kept|made|held|left|built|cut|drawn|known|seen)"
)
GETTER = re.compile(r"_?(get|load|read)_")
VERBS = {"embed", "feed", "shed", "open", "listen", "apply", "supply", "multiply", "string", "bring"}
EXAMPLES = {
    "told": "A temperature told to the model",
    "by chance": "flipped by chance",
    "be told": "cannot be told from noise",
    "goes on with": "the command goes on with it",
    "too unsure": "too unsure by 8.6 %",
}


def find_docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def find_sentences(source: str, *, with_docstrings: bool) -> Iterator[tuple[int, str]]:
    """(line, text) of every string with a space in it. Typer shows the docstrings of commands as help."""
    tree = ast.parse(source)
    skipped = set() if with_docstrings else {id(node) for node in find_docstrings(tree)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped
        if is_text and " " in node.value:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_messages_help_and_captions_have_no_banned_words(path: Path) -> None:
    sentences = find_sentences(path.read_text(encoding="utf-8"), with_docstrings=path.parent.name == "cli")
    matches = [
        f"line {line}: {match[0]!r} in {text[:80]!r}" for line, text in sentences if (match := BANNED.search(text))
    ]
    assert not matches


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_pages_and_exercises_have_no_banned_words(path: Path) -> None:
    assert BANNED.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("word", "sentence"), EXAMPLES.items())
def test_a_banned_word_is_found(word: str, sentence: str) -> None:
    source = f'def f():\n    """{sentence}."""\n    print("{sentence}")\n'
    assert [line for line, text in find_sentences(source, with_docstrings=False) if BANNED.search(text)] == [3]
    assert [line for line, text in find_sentences(source, with_docstrings=True) if BANNED.search(text)] == [2, 3]
    assert word in sentence


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_have_no_banned_words(path: Path) -> None:
    docstrings = find_docstrings(ast.parse(path.read_text(encoding="utf-8")))
    matches = [f"line {node.lineno}: {match[0]!r}" for node in docstrings if (match := BANNED.search(str(node.value)))]
    assert not matches


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_function_names_are_no_bare_participles(path: Path) -> None:
    assert find_participles(path.read_text(encoding="utf-8")) == []


def find_participles(source: str) -> list[str]:
    """Return the names of functions that are one participle, gerund or adverb. Properties may be participles."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    plain = [node.name for node in functions if "property" not in {ast.unparse(item) for item in node.decorator_list}]
    return [name for name in plain if PARTICIPLE.fullmatch(name) and name.strip("_") not in VERBS]


def test_a_participle_is_found_and_a_verb_is_not() -> None:
    names = ["settled", "_shown", "quietly", "judging", "told", "embed", "open", "load_checkpoint", "train"]
    source = "".join(f"def {name}(): ...\n" for name in names) + "@property\ndef finished(): ...\n"
    assert find_participles(source) == ["settled", "_shown", "quietly", "judging", "told"]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_got_loaded_or_read_is_never_none_unless_the_name_says_so(path: Path) -> None:
    assert find_getters_of_none(path.read_text(encoding="utf-8")) == []


def find_getters_of_none(source: str) -> list[str]:
    """Return the names of functions such as `load_checkpoint` that may return None."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.returns]
    may_return_none = [node.name for node in functions if re.search(r"\| None'?$", ast.unparse(node.returns or node))]
    return [name for name in may_return_none if GETTER.match(name) and not name.endswith(("_if_any", "get_next"))]


def test_a_getter_of_none_is_found_and_others_are_not() -> None:
    source = """
def load_checkpoint(run) -> Checkpoint | None: ...
def _get_version() -> "str | None": ...
def load_weights_if_any() -> Weights | None: ...
def find_checkpoint() -> Checkpoint | None: ...
def get_versions() -> dict[str, str | None]: ...
"""
    assert find_getters_of_none(source) == ["load_checkpoint", "_get_version"]
