"""Read the classes of a folder's images from a table: file, class and optionally the split."""

import csv
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from vitascope.data.config import DataConfig
from vitascope.data.dataset import DataSource, ImageSize, SplitName
from vitascope.data.sources.folder import ImageFolderReader, LabelledFiles, list_image_files, make_image_format
from vitascope.errors import UserError, format_count

TABLE_SUFFIXES = (".csv", ".tsv")  # of a table that data.name names; data.labels may have any
DELIMITERS = ("\t", ";", ",")
FILE_HEADERS = ("file", "filename", "file_name", "filepath", "path", "image", "image_path", "img", "name", "id")
CLASS_HEADERS = ("class", "label", "class_name", "label_name", "category", "target", "species")
CLASS_HEADERS += ("class_index", "class_id", "label_index", "label_id")  # only if there are no names
SPLIT_HEADERS = ("split", "subset", "set")
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test", "": "train"}
MAX_NAMED = 5


class LabelRow(NamedTuple):
    """A row of the table. `line`: its line in the file, from 1."""

    file: str
    class_name: str
    split: SplitName
    line: int


class LabelTable(NamedTuple):
    """The labels of a folder's images: path relative to the folder -> row; and sentences about what is not used."""

    rows_by_path: dict[str, LabelRow]
    notes: list[str]


def open_labelled_folder(
    folder: Path, table: Path, image_size: ImageSize, num_channels: int, config: DataConfig, min_classes: int = 2
) -> DataSource:
    """Open the images of a folder with the classes of a table. Its images are sorted by class and path."""
    image_format = make_image_format(num_channels, image_size)
    files = {Path(file.path).relative_to(folder).as_posix(): file for file in list_image_files(folder)}
    rows_by_path, notes = match_label_table(table, folder, list(files), strict=config.strict)
    splits = [split for split in ("train", "val", "test") if any(row.split == split for row in rows_by_path.values())]
    if "train" not in splits and min_classes == 2:
        raise UserError(f"{table} has no training images: all rows are of the splits {', '.join(splits)}.")
    class_names = _list_class_names_of_split(table, [*rows_by_path.values()], splits[0])
    if len(class_names) < min_classes:
        raise UserError(f"{table} has only one class, {class_names[0]}. Training needs at least two.")

    def list_split(split: SplitName) -> LabelledFiles:
        indices = {path: class_names.index(row.class_name) for path, row in rows_by_path.items() if row.split == split}
        ordered = sorted(indices, key=lambda path: (indices[path], Path(path).parts))
        return LabelledFiles(
            folder, [files[path] for path in ordered], torch.tensor([indices[path] for path in ordered])
        )

    reader = ImageFolderReader(list_split, class_names, image_format, replace(config, labels=str(table)))
    name = folder.resolve().name
    return DataSource(
        name, class_names, reader.load_split, tuple(splits), reader.skipped_paths, reader.list_files, notes=notes
    )


def find_label_table(labels: str, folder: Path) -> Path:
    """Return the path of the table, as given or in the data's folder."""
    for path in (Path(labels).expanduser(), folder / labels):
        if path.is_file():
            return path
    raise UserError(f"There is no table '{labels}' in {Path.cwd()} or {folder}. Set data.labels to its path.")


def match_label_table(table: Path, folder: Path, relative_paths: list[str], *, strict: bool) -> LabelTable:
    """Match the rows of the table with the images of the folder. `strict`: a row without an image is an error."""
    known, rows_by_path, missing = set(relative_paths), {}, []
    rows = read_label_rows(table)
    for row in rows:
        path = _find_relative_path(row.file, table, folder, known)
        if path is None:
            missing.append(row)
            continue
        earlier = rows_by_path.setdefault(path, row)
        _check_same_label(table, earlier, row)
    if not rows_by_path:
        raise UserError(
            f"None of the files in {table} is in {folder}; the first is {rows[0].file}. Paths are relative to the "
            "table or to data.name, and include the ending, such as .jpg."
        )
    notes = _describe_missing_files(table, folder, missing)
    if missing and strict:
        raise UserError(f"{notes[0]} To skip them, set data.strict=false.")
    unlabelled = [path for path in relative_paths if path not in rows_by_path]
    if unlabelled:
        verb = "has no row" if len(unlabelled) == 1 else "have no row"
        images = format_count(len(unlabelled), "image")
        notes.append(f"{images} of {folder} {verb} in {table.name} and will not be used: {_join_some(unlabelled)}.")
    return LabelTable(rows_by_path, notes)


def read_label_rows(table: Path) -> list[LabelRow]:
    """Read all rows. The first one may be a header; columns are separated by commas, semicolons or tabs."""
    lines = _read_cells(table)
    columns = _find_columns_by_header(lines[0].cells)
    has_header = columns is not None or not Path(lines[0].cells[0]).suffix  # a header with other words has no ending
    lines = lines[1:] if has_header else lines
    if not lines:
        raise UserError(f"{table} has only a header. Each row must contain a file and its class.")
    columns = columns or _guess_columns(lines)
    return [_make_row(table, line, columns) for line in lines]


class Line(NamedTuple):
    number: int
    cells: list[str]


class Columns(NamedTuple):
    """Indices of the columns."""

    file: int
    class_name: int
    split: int | None


def _read_cells(table: Path) -> list[Line]:
    """Split the table into cells with the first delimiter that gives every row at least two."""
    try:
        text = table.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{table} cannot be read as UTF-8 text ({error}).") from error
    lines: list[Line] = []
    for delimiter in DELIMITERS:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
        lines = [Line(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
        lines = [line for line in lines if any(line.cells)]
        if lines and all(len(line.cells) >= 2 for line in lines):
            return lines
    if not lines:
        raise UserError(f"{table} is empty. Each row must contain a file and its class.")
    short = next(line for line in lines if len(line.cells) < 2)
    raise UserError(
        f"Line {short.number} of {table} has no second column. Each row must contain a file and its class, separated "
        "by a comma, a semicolon or a tab."
    )


def _find_columns_by_header(cells: list[str]) -> Columns | None:
    """Return the columns that the first row names; None if it is not a header with known words."""
    names = [cell.lower().replace(" ", "_") for cell in cells]
    file, label, split = (
        next((names.index(header) for header in headers if header in names), None)
        for headers in (FILE_HEADERS, CLASS_HEADERS, SPLIT_HEADERS)
    )
    return None if file is None or label is None else Columns(file, label, split)


def _guess_columns(lines: list[Line]) -> Columns:
    """Return file, class, and the third column as split if it has nothing but names of splits."""
    thirds = [line.cells[2].lower() if len(line.cells) > 2 else "" for line in lines]
    return Columns(0, 1, 2 if any(thirds) and all(text in SPLIT_NAMES for text in thirds) else None)


def _make_row(table: Path, line: Line, columns: Columns) -> LabelRow:
    cells = line.cells + [""] * (max(columns.file, columns.class_name, columns.split or 0) + 1 - len(line.cells))
    file, class_name = cells[columns.file], cells[columns.class_name]
    split = cells[columns.split].lower() if columns.split is not None else ""
    if not file or not class_name:
        missing = "class" if file else "file"
        raise UserError(f"Line {line.number} of {table} has no {missing}: {', '.join(filter(None, line.cells))}.")
    if split not in SPLIT_NAMES:
        raise UserError(f"Line {line.number} of {table} has the unknown split '{split}'. Choose train, val or test.")
    return LabelRow(file, class_name, SPLIT_NAMES[split], line.number)


def _find_relative_path(file: str, table: Path, folder: Path, known: set[str]) -> str | None:
    """Return the path relative to the folder, of a file given relative to the table or the folder; None if unknown."""
    for name in dict.fromkeys((file, file.replace("\\", "/"))):
        for base in (table.parent, folder):
            relative = os.path.relpath(base.absolute() / name, folder.absolute()).replace(os.sep, "/")
            if relative in known:
                return relative
    return None


def _check_same_label(table: Path, first: LabelRow, second: LabelRow) -> None:
    for kind, values in (("classes", (first.class_name, second.class_name)), ("splits", (first.split, second.split))):
        if values[0] != values[1]:
            raise UserError(
                f"{table} gives {second.file} two {kind}: {values[0]} (line {first.line}) and {values[1]} "
                f"(line {second.line}). Remove one of the rows."
            )


def _describe_missing_files(table: Path, folder: Path, missing: list[LabelRow]) -> list[str]:
    if not missing:
        return []
    named = _join_some([f"{row.file} (line {row.line})" for row in missing])
    start = f"{format_count(len(missing), 'file')} in {table.name} {'is' if len(missing) == 1 else 'are'} not"
    return [f"{start} in {folder}: {named}."]


def _list_class_names_of_split(table: Path, rows: list[LabelRow], split: SplitName) -> list[str]:
    """Return the classes of a split, indices by their value. Raise an error if another split has other classes."""
    names = {row.class_name for row in rows if row.split == split}
    for row in rows:
        if row.class_name not in names:
            raise UserError(
                f"{table} has the class {row.class_name} in the {row.split} split (line {row.line}), but not in "
                f"{split}. Give it {split} images or remove these rows."
            )
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)


def _join_some(texts: list[str]) -> str:
    return ", ".join(texts[:MAX_NAMED]) + (", …" if len(texts) > MAX_NAMED else "")
