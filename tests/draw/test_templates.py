"""Templates: text stays text in HTML and in Markdown, a missing value is an error, and every page is self-contained."""

import re
from html import escape, unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from vitascope.draw.html import (
    TEMPLATES_FOLDER,
    Code,
    Document,
    Heading,
    Picture,
    Table,
    Text,
    escape_markdown,
    find_number_columns,
    format_markdown_inline_code,
    format_markdown_table,
    format_parts_for_notebook,
    make_html_table,
    render_template,
)

MARKUP = ("<script>alert(1)</script>", "a&b", "&lt;", "\"'><img src=x>", "{{ 7 * 7 }}", "*a* _b_ [c](d) `e`|f")
ONE_LINE = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1).map(
    lambda text: f"a {text.strip()} z"
)


class TextOf(HTMLParser):
    """Collect the text and the tags of a page as a browser reads them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[list[tuple[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@given(ONE_LINE)
def test_escaped_markdown_is_read_as_the_same_text(text: str) -> None:
    """The reader is markdown-it, an independent implementation of CommonMark, with tables and strikethrough."""
    reader = MarkdownIt().enable(["table", "strikethrough"])
    expected = escape(" ".join(text.split()), quote=False).replace('"', "&quot;")
    assert reader.render(escape_markdown(text)) == f"<p>{expected}</p>\n"
    table = reader.render(format_markdown_table(["head"], [[escape_markdown(text)]]))
    assert f"<td>{expected}</td>" in table and table.count("<td>") == 1


@given(ONE_LINE)
def test_code_in_markdown_is_read_as_the_same_text(text: str) -> None:
    expected = escape(" ".join(text.split()), quote=False).replace('"', "&quot;")
    assert MarkdownIt().render(format_markdown_inline_code(text)) == f"<p><code>{expected}</code></p>\n"


@pytest.mark.parametrize("text", MARKUP)
def test_text_in_a_document_stays_text(text: str) -> None:
    document = Document(text, [Heading(text), Text(f"x {text} y", lead=text), Code(text), Table([text], [[text]])])
    page = TextOf(document.format_html_page())
    text_of_page = "".join(page.texts).replace("`", "")  # in a paragraph, backticks mark code
    assert text_of_page.count(text.replace("`", "")) == 8 and not {"img", "script"} & set(page.tags)
    plain = Document(text, [Heading(text), Table([text], [[text]])]).format_markdown()
    shown = TextOf(MarkdownIt().enable("table").render(plain))
    assert shown.texts.count(text) == 4 and not {"img", "script", "em", "a", "code"} & set(shown.tags)


@pytest.mark.parametrize("text", MARKUP)
def test_text_in_a_notebook_table_stays_text(text: str) -> None:
    assert TextOf(make_html_table([text], [[text]])).texts.count(text) == 2


def test_a_value_that_a_template_does_not_get_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'rows' is undefined"):
        render_template("table.html.j2", columns=["a"])


def test_a_figure_is_stored_once_and_shown_at_its_size() -> None:
    picture = Picture.from_figure("a <b>", Figure(figsize=(4, 2), dpi=150), "a.png")
    assert picture.width == 4 * 96
    html = format_parts_for_notebook([picture])
    assert 'alt="a &lt;b&gt;"' in html and html.count("data:image/png;base64,") == 1
    assert "![a \\<b>](a.png)" in Document("title", [picture]).format_markdown()


def test_columns_of_numbers_are_recognised() -> None:
    rows = [
        ["a", "1", "97.56 ± 0.37 %", "-3.33 ± 22.17", "4 k", "", "1 × 2"],
        ["2", "1,200", "–", "+1", "1.7 M", "3", "4"],
    ]
    assert find_number_columns(rows) == [False, True, True, True, True, True, False]
    assert find_number_columns([]) == [] and "<th>a</th>" in make_html_table(["a"], [])


def test_a_page_allows_no_script_and_no_network() -> None:
    page = Document("title").format_html_page()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert unescape(policy) == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    for template in TEMPLATES_FOLDER.iterdir():
        assert "http://" not in template.read_text() and "https://" not in template.read_text()
