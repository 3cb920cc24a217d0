"""Write all output of `vitascope explain`: figures, and explanations.json with the numbers."""

import json
from pathlib import Path

from vitascope.evaluation.reading import EXPLAINED, Pictures
from vitascope.explain.figures import Asked, Written, write_explanations
from vitascope.explain.over_time import write_over_time
from vitascope.explain.probing import images_of, probe
from vitascope.explain.subject import Subject
from vitascope.run.files import write_whole


def write_everything(
    subject: Subject, pictures: Pictures, asked: Asked, out: Path, *, analysis: bool = True, split: str | None = None
) -> Written:
    """Write everything; `analysis` adds statistics of the model on the run's images of `split` and over its epochs."""
    own = images_of(subject, split) if analysis else None  # first: a wrong split is reported before anything is drawn
    written = write_explanations(subject, pictures, asked, out)
    if analysis:
        written.files += probe(subject, own, pictures.images, out)
        written.files += write_over_time(subject, subject.preparation(pictures.images), out)
    written.files.append(out / EXPLAINED)
    write_whole(out / EXPLAINED, json.dumps(written.as_dict(), indent=1) + "\n")
    return written
