"""The picture behind `vitascope data preview`: images on the left, augmented ones beside them."""

from dataclasses import replace
from pathlib import Path

from vitascope.data.description import PREVIEW_SIZE
from vitascope.data.draws import epoch_draws, one_step
from vitascope.data.policy import resolve
from vitascope.data.training_data import open_training_data
from vitascope.draw.gallery import draw_gallery
from vitascope.draw.look import save
from vitascope.recipe.reading import read_recipe

ROWS, VARIANTS = 6, 8


def draw_preview(name: str, settings: list[str], root: str | None, seed: int, out: Path) -> Path:
    """Each row is one image and eight of its training versions."""
    config = read_recipe(None, settings).data
    config = replace(config, name=name, root=root or config.root, validation=0.0)
    data = open_training_data(config, *PREVIEW_SIZE, seed)
    policy = resolve(config.augment, name, data.train.images.shape[1])
    height, width = data.train.images.shape[2:]
    prepare = replace(data.preparation, size=(height, width))
    chosen = data.train.evenly(ROWS)
    draws = epoch_draws(policy, VARIANTS, len(chosen), seed, epoch=0)
    columns = [prepare.undone(prepare(chosen.images))]
    for variant in range(VARIANTS):
        varied, _ = prepare.varied(chosen.images, chosen.labels, one_step(draws, variant), policy)
        columns.append(prepare.undone(varied))
    rows = [[column[row].permute(1, 2, 0).numpy() for column in columns] for row in range(len(chosen))]
    names = [data.classes[label] for label in chosen.labels.tolist()]
    used = ", ".join(f"{key} {value:g}" for key, value in policy.in_effect.items())
    text = f"{data.source.name}: the stored image, then {VARIANTS} versions as training sees it ({used or 'as it is'})."
    return save(draw_gallery(rows, names, ["stored", *[f"draw {n + 1}" for n in range(VARIANTS)]], text), out)
