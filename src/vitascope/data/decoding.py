"""Read image files as arrays of one size, in this process or in worker processes that do not import PyTorch.

This file is also the worker's script: it reads requests from its standard input and writes pixels to its output.
"""

import atexit
import os
import pickle
import queue
import struct
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin

MAX_WORKERS = 16
MAX_PIXELS = 64_000_000  # of an image that is decoded; a JPEG file with more is reduced while it is decoded
CHUNK_SIZE = 32  # images per request to a worker
MAX_INLINE_BYTES = 2_000_000  # smaller files in all are read faster than workers start
REQUEST_HEADER, REASON_HEADER = struct.Struct("<Q"), struct.Struct("<I")
READABLE, UNREADABLE = b"\1", b"\0"

PixelArray = NDArray[np.uint8]  # (image ×) channel × row × column


class ImageFormat(NamedTuple):
    """The shape that every image file is converted to."""

    channels: int
    rows: int
    columns: int


class UnreadableImage(NamedTuple):
    """Why an image file cannot be read."""

    reason: str


UnreadableByIndex = dict[int, UnreadableImage]  # index of the file -> why it cannot be read


class DecodedFiles(NamedTuple):
    """The pixels of all files, and the reasons why some cannot be read, by index. Their pixels are undefined."""

    pixels: PixelArray
    unreadable: UnreadableByIndex


class ImageTooLargeError(ValueError):
    """An image has so many pixels that decoding it would exhaust the memory."""


def open_image_header(path: str | os.PathLike[str]) -> Image.Image:
    """Open a file of any size without decoding it. Pillow's own limit is below that of some cameras."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return Image.open(path)
        except Image.DecompressionBombError:
            try:
                return JpegImagePlugin.JpegImageFile(path)
            except SyntaxError as error:
                raise ImageTooLargeError from error


def open_image_within_limit(path: str | os.PathLike[str]) -> Image.Image:
    """Open a file. A JPEG file above MAX_PIXELS will be decoded in a half, a quarter or an eighth of its size."""
    image = open_image_header(path)
    columns, rows = image.size
    if columns * rows > MAX_PIXELS:
        divisors = (divisor for divisor in (2, 4, 8) if columns * rows <= MAX_PIXELS * divisor**2)
        divisor = next(divisors, 8)
        image.draft(None, (columns // divisor, rows // divisor))  # no effect on other files than JPEG
    if image.size[0] * image.size[1] > MAX_PIXELS:
        image.close()
        raise ImageTooLargeError
    return image


def decode_image_or_error_reason(
    path: str | os.PathLike[str], image_format: ImageFormat
) -> PixelArray | UnreadableImage:
    """Return the pixels of a file, or the reason why it cannot be read."""
    try:
        # Pillow's warnings are about parts of a file that it skips, such as damaged EXIF data.
        with warnings.catch_warnings(action="ignore"), open_image_within_limit(path) as file:
            return crop_and_resize_pil_image_to_array(file, image_format)
    except Image.UnidentifiedImageError:
        return UnreadableImage("unknown image format")
    except (ImageTooLargeError, Image.DecompressionBombError):
        return UnreadableImage(f"it has more than {MAX_PIXELS:,} pixels: reduce it, or save it as a JPEG file")
    except (OSError, ValueError, SyntaxError, RuntimeError):
        return UnreadableImage("it is damaged or truncated")


def crop_and_resize_pil_image_to_array(pil_image: Image.Image, image_format: ImageFormat) -> PixelArray:
    """Rotate by EXIF, centre-crop to the aspect ratio, and resize (bicubic)."""
    image = convert_to_8bit_opaque(ImageOps.exif_transpose(pil_image))
    image = image.convert("L" if image_format.channels == 1 else "RGB")
    size = (image_format.columns, image_format.rows)
    if image.size != size:
        image = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.uint8).reshape(image_format.rows, image_format.columns, image_format.channels)
    return pixels.transpose(2, 0, 1).copy()


def convert_to_8bit_opaque(image: Image.Image) -> Image.Image:
    """Convert to 8 bits: 16-bit and float images keep their range, transparent images get a white background."""
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode.startswith("I;16") or values.max() > 255 else 255.0
        top = 1.0 if image.mode == "F" and values.max() <= 1 else top
        return Image.fromarray((values.clip(0, top) * (255.0 / top)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def decode_files(paths: Sequence[str], image_format: ImageFormat, *, use_workers: bool) -> DecodedFiles:
    """Decode all files, in order. The pixels do not depend on `use_workers`."""
    pixels = np.empty((len(paths), *image_format), dtype=np.uint8)
    if use_workers:
        return DecodedFiles(pixels, get_or_start_decode_workers().decode_into(pixels, paths, image_format))
    unreadable = {}
    for index, path in enumerate(paths):
        image = decode_image_or_error_reason(path, image_format)
        if isinstance(image, UnreadableImage):
            unreadable[index] = image
        else:
            pixels[index] = image
    return DecodedFiles(pixels, unreadable)


class DecodeWorker:
    """A process that decodes the files of one request after the other."""

    def __init__(self) -> None:
        # -P: the folder of this script is not searched for modules, because some have names of the standard library.
        command = [sys.executable, "-P", __file__]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same Pillow as in this process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=2**20
        )

    def decode_into(self, pixels: PixelArray, paths: Sequence[str], image_format: ImageFormat) -> UnreadableByIndex:
        """Write the pixels of the files into `pixels`; return the unreadable ones by index."""
        requests, answers = self.process.stdin, self.process.stdout
        if requests is None or answers is None:
            raise OSError("the worker has no pipes")
        request = pickle.dumps((list(paths), tuple(image_format)))
        requests.write(REQUEST_HEADER.pack(len(request)) + request)
        requests.flush()
        unreadable = {}
        for index in range(len(paths)):
            if _read_exactly(answers, 1) == READABLE:
                _read_exactly_into(answers, memoryview(pixels[index]).cast("B"))
            else:
                length = REASON_HEADER.unpack(_read_exactly(answers, REASON_HEADER.size))[0]
                unreadable[index] = UnreadableImage(_read_exactly(answers, length).decode())
        return unreadable

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # a request that the worker did not read
                    pipe.close()


class DecodeWorkers:
    """A pool of worker processes. `decode_into` may be called from several threads at once."""

    def __init__(self, num_workers: int) -> None:
        self.workers = [DecodeWorker() for _ in range(num_workers)]
        self.idle: queue.SimpleQueue[DecodeWorker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")

    def decode_into(self, pixels: PixelArray, paths: Sequence[str], image_format: ImageFormat) -> UnreadableByIndex:
        """Write the pixels of the files into `pixels`; return the unreadable ones by index."""
        size = max(1, min(CHUNK_SIZE, -(-len(paths) // len(self.workers))))
        starts = range(0, len(paths), size)

        def decode_chunk(start: int) -> UnreadableByIndex:
            worker = self.idle.get()
            try:
                chunk = paths[start : start + size]
                return worker.decode_into(pixels[start : start + size], chunk, image_format)
            finally:
                self.idle.put(worker)

        unreadable: UnreadableByIndex = {}
        for start, chunk_unreadable in zip(starts, self.threads.map(decode_chunk, starts), strict=True):
            unreadable |= {start + index: error for index, error in chunk_unreadable.items()}
        return unreadable

    def stop(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.stop()


@cache
def get_or_start_decode_workers() -> DecodeWorkers:
    """Start the worker processes of this process, once. They end with it."""
    workers = DecodeWorkers(min(MAX_WORKERS, count_usable_cpus()))
    atexit.register(workers.stop)
    return workers


def count_usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise EOFError("A process that reads image files ended before it had answered.")
    return content


def _read_exactly_into(stream: Any, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise EOFError("A process that reads image files ended before it had answered.")
        done += count


def answer_decode_requests_until_closed(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Decode the files of every request, until the parent process closes the pipe."""
    while header := requests.read(REQUEST_HEADER.size):
        paths, image_format = pickle.loads(requests.read(REQUEST_HEADER.unpack(header)[0]))
        for path in paths:
            image = decode_image_or_error_reason(path, ImageFormat(*image_format))
            if isinstance(image, UnreadableImage):
                reason = image.reason.encode()
                answers.write(UNREADABLE + REASON_HEADER.pack(len(reason)) + reason)
            else:
                answers.write(READABLE)
                answers.write(image.data)
        answers.flush()


def _serve_decode_requests_of_parent() -> None:
    import signal
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb", buffering=2**20)
    os.dup2(2, 1)  # what a library prints must not mix with the pixels
    try:
        answer_decode_requests_until_closed(sys.stdin.buffer, answers)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)


if __name__ == "__main__":
    _serve_decode_requests_of_parent()
