"""The report in a real browser: it opens from disk, makes no network requests, and shows what Python computes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image

from tests.draw.test_templates import TextOf
from tests.training.tiny import tiny_run
from vitascope import open_model
from vitascope.explain import attention_maps, get_token_layout, rollout
from vitascope.explain.attribution import build_attribution_inputs
from vitascope.explain.report import (
    PAGE_FOLDER,
    choose_errors_and_correct_examples,
    compute_page_arrays_of_image,
    evaluate_and_write_html_report,
)

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def read_page_data(page: str) -> dict:
    """Return the page's only JSON block."""
    [block] = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(block)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, its report, its model and the images the report shows."""
    settings = {"train.epochs": 3, "model.class_token": True, "model.global_pool": "token"}
    run = tiny_run(tmp_path_factory.mktemp("reported"), **settings)
    model = open_model(run.path)
    images, words = choose_errors_and_correct_examples(model, model.evaluate("val"))
    return evaluate_and_write_html_report(run.path), model, images, words


def test_maps_in_bytes_are_the_maps(made) -> None:
    _, model, images, _ = made
    image = model.info.preparation(images[:1])
    stored = compute_page_arrays_of_image(model.model, image, images[:1])
    maps = torch.cat(attention_maps(model.model, image)).numpy()
    back = stored["maps"] * stored["maps_scale"][..., None]
    assert np.abs(back - maps).max() <= 0.002 * maps.max()
    assert stored["image"].shape == (8, 8, 1) and stored["logits"].shape == (10,)


def test_the_report_makes_no_network_requests_and_holds_all_its_parts(made) -> None:
    page = made[0].read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page) and "default-src 'none'" in page
    for title in (
        "Model",
        "Training curves",
        "Attention maps",
        "Evaluation",
        "Worst errors",
        "Heads, blocks and features",
    ):
        assert title in page
    assert page.count("class and register") == 0, "the model has no register tokens"
    assert len(read_page_data(page)["examples"]) == 8 and made[0].stat().st_size < 5 * 2**20


ODD_NAMES = ["<img src=x onerror=alert(1)>", "<script>alert(1)<", "a&b", "&lt;"]


def write_photos_of_odd_classes(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in ODD_NAMES:
        (folder / name).mkdir(parents=True)
        for index in range(12):
            pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def test_class_and_file_names_like_markup_stay_text_on_every_page(tmp_path) -> None:
    photos = write_photos_of_odd_classes(tmp_path / "photos")
    run = tiny_run(tmp_path, **{"data.name": str(photos), "train.batch_size": 8, "data.validation": 0.5})
    model = open_model(run.path)
    page = evaluate_and_write_html_report(run.path).read_text(encoding="utf-8")
    predictions = model.predict(sorted((photos / ODD_NAMES[0]).iterdir()))
    views = [page, *(view._repr_html_() for view in (model, predictions, model.evaluate("val")))]
    for html in views:
        read = TextOf(html)
        text = "".join(read.texts)
        assert all(name in text for name in (ODD_NAMES if html is not views[2] else ODD_NAMES[:1]))
        assert not any(name.startswith("on") for attributes in read.attributes for name, _ in attributes)
    assert TextOf(page).tags.count("script") == 3, "import map, data, entry point"
    captions = [example["caption"] for example in read_page_data(page)["examples"]]
    assert any(name in caption for caption in captions for name in ODD_NAMES)


def test_every_page_file_says_what_it_is_and_imports_only_its_neighbours() -> None:
    for path in PAGE_FOLDER.glob("*.js"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("// ") and len(lines) <= 200
        for line in lines:
            assert "innerHTML" not in line and "eval(" not in line and "http" not in line
            if line.startswith("import"):
                assert re.fullmatch(r"import \{ [\w, ]+ \} from '\./\w+\.js';", line)


@pytest.fixture
def browser_page(made):
    sync = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Debian's chromium is not on this machine: apt-get install chromium")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS, timeout=0)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(0)  # a busy machine is slow, not wrong
        errors, urls = [], []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(made[0].as_uri())
        page.wait_for_selector("#viewer[data-ready=yes]")
        yield page
        assert not errors and [url for url in urls if not url.startswith("data:")] == [made[0].as_uri()]
        browser.close()


def read_cell_values(page) -> list[float]:
    """Return the values in the labels of the cells."""
    labels = page.locator(".stage-grid button").evaluate_all("cells => cells.map(cell => cell.ariaLabel)")
    return [float(label.split(", ")[2]) for label in labels]


def test_hovering_a_patch_shows_what_python_computes(made, browser_page) -> None:
    _, model, images, _ = made
    maps, page = attention_maps(model.model, model.info.preparation(images)), browser_page
    layout = get_token_layout(model.model)
    for number, block, head, patch in ((0, 1, 0, 5), (0, 0, 1, 10), (3, 1, 1, 0)):
        page.locator("[name=example]").select_option(str(number))
        page.locator("[name=block]").select_option(str(block))
        page.locator("[name=head]").select_option(str(head))
        page.locator(".stage-grid button").nth(patch).hover()
        row = maps[block][number, head, layout.num_prefix_tokens + patch]
        wanted = row[layout.num_prefix_tokens :].numpy()
        page.wait_for_function(
            f"() => document.querySelectorAll('.stage-grid button')[{patch}].ariaSelected === 'true'"
        )
        assert read_cell_values(page) == pytest.approx(wanted.tolist(), abs=0.0015)
        top = max(wanted.max(), 2 / len(row))
        pixels = page.locator(".stage-map").evaluate(
            "map => [...map.getContext('2d').getImageData(0, 0, map.width, map.height).data]"
        )
        table = (np.array(colormaps["viridis"].colors) * 255).round()
        steps = np.minimum(255, np.rint(255 * wanted / top)).astype(int)
        colours = np.array(pixels).reshape(-1, 4)[:, :3]
        assert np.abs(colours - table[steps]).max() <= 4  # a byte's rounding is a neighbouring colour
        tile = (
            page.locator(".heads canvas")
            .nth(2 * block + head)
            .evaluate("map => [...map.getContext('2d').getImageData(0, 0, map.width, map.height).data]")
        )
        query = layout.num_prefix_tokens + patch
        shared = max(maps[block][number, :, query, layout.num_prefix_tokens :].max().item(), 2 / len(row))
        steps = np.minimum(255, np.rint(255 * wanted / shared)).astype(int)
        assert np.abs(np.array(tile).reshape(-1, 4)[:, :3] - table[steps]).max() <= 4


def test_rollout_in_the_page_is_rollout(made, browser_page) -> None:
    _, model, images, _ = made
    layout = get_token_layout(model.model)
    browser_page.locator("[name=map]").select_option("rollout")
    browser_page.locator(".stage-grid button").nth(6).hover()
    browser_page.wait_for_function("() => document.querySelector('.sentence').textContent.includes('row 2, column 3')")
    through = rollout(attention_maps(model.model, model.info.preparation(images[:1])))[0, layout.num_prefix_tokens + 6]
    assert read_cell_values(browser_page) == pytest.approx(through[layout.num_prefix_tokens :].tolist(), abs=0.0015)


def test_relevance_in_the_page_is_relevance(made, browser_page) -> None:
    _, model, images, _ = made
    asked, page = build_attribution_inputs(model.model, model.info.preparation(images[:1])), browser_page
    page.locator("[name=example]").select_option("0")
    page.locator("[name=map]").select_option("relevance")
    layout, counts = asked.layout, asked.relevance_without_identity[0]
    page.locator(".stage-grid button").nth(5).hover()
    row = counts[layout.num_prefix_tokens + 5]
    wanted = (row / row.sum())[layout.num_prefix_tokens :]
    assert read_cell_values(page) == pytest.approx(wanted.tolist(), abs=0.0015)
    assert page.locator("[name=block]").is_disabled() and "for the prediction" in page.locator(".sentence").inner_text()


def test_patches_can_be_pinned_released_and_reached_by_keys(browser_page) -> None:
    page, cells = browser_page, browser_page.locator(".stage-grid button")
    cells.nth(5).click()
    cells.nth(9).hover()
    assert cells.nth(5).get_attribute("aria-selected") == "true"  # kept
    cells.nth(5).press("Escape")
    assert page.locator(".stage-grid button[aria-selected=true]").count() == 0
    cells.nth(0).focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert cells.nth(4).get_attribute("aria-selected") == "true"
    assert page.locator(".stage-grid button[tabindex='0']").count() == 1
    page.locator(".heads button").nth(1).click()
    assert page.locator("[name=block]").input_value() == "0" and page.locator("[name=head]").input_value() == "1"


def test_nothing_runs_over_the_edge_of_a_phone(browser_page) -> None:
    for width in (320, 390, 768):
        browser_page.set_viewport_size({"width": width, "height": 844})
        assert browser_page.evaluate("() => document.documentElement.scrollWidth") <= width
