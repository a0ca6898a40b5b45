"""Where files lie: local paths, replaced at once or not at all, and the URLs that fsspec knows."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be deleted
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".memos-unfinished"

AnyPath = str | os.PathLike[str]


@contextmanager
def writing(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write, which is at `path` when the block has ended without an error; nobody sees it before.

    Raises
    ------
    OSError
        If it cannot be written; what was at `path` is there still.
    ImportError
        If `path` is a URL and fsspec, or what it needs for this kind of URL, is not installed.
    """
    if not _is_url(path):
        with _replacing(_local(path)) as file:
            yield file
        return
    files, name = _remote(path)
    with _temporary() as (local, file):
        yield file
        file.flush()
        files.put_file(str(local), name)


@contextmanager
def reading(path: AnyPath) -> Iterator[Path]:
    """A local file with what is at `path`, for the length of the block. Errors as for `writing`."""
    if not _is_url(path):
        yield _local(path)
        return
    files, name = _remote(path)
    with _temporary() as (local, _):
        files.get_file(name, str(local))
        yield local


def _is_url(path: AnyPath) -> bool:
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def _local(path: AnyPath) -> Path:
    if isinstance(path, bytes) or not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a path or a URL, got {type(path).__name__}")
    return Path(str(path).removeprefix("file://"))


def _remote(url: AnyPath) -> tuple[Any, str]:
    try:
        core = import_module("fsspec.core")
    except ImportError:
        raise ImportError(f"path: {url} is a URL, which needs fsspec: pip install fsspec") from None
    files, name = core.url_to_fs(url)
    return files, name


@contextmanager
def _temporary() -> Iterator[tuple[Path, BinaryIO]]:
    """A local file for the length of the block, which nobody else can read."""
    folder = Path(tempfile.gettempdir())
    remove_abandoned(folder)
    path, file = _create_unfinished(folder, mode=0o600)
    try:
        with file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Written under another name in the same folder, made durable, then renamed."""
    path = Path(os.path.realpath(path))  # a link is followed, not replaced
    if path.is_dir():
        raise IsADirectoryError(f"path: expected a file, got the folder {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: there is no folder {path.parent}")
    remove_abandoned(path.parent)
    unfinished, file = _create_unfinished(path.parent)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(unfinished, path)
        if fcntl is None:
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _create_unfinished(folder: Path, mode: int = 0o666) -> tuple[Path, BinaryIO]:
    """A new file, locked for as long as it is open: a lock ends with its process, however that ends."""
    while True:
        path = folder / f".{secrets.token_hex(8)}{UNFINISHED}"
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode), "wb")
        if not _lock(file, wait=True):
            return path, file
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return path, file
        file.close()  # somebody removed it between its creation and its locking


def remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files of processes that are gone."""
    for path in folder.glob(f".*{UNFINISHED}"):
        # One that cannot be opened or deleted belongs to somebody else.
        with suppress(OSError), path.open("rb") as file:
            if fcntl is not None and _lock(file, wait=False):
                path.unlink()
        if fcntl is None:
            with suppress(OSError):
                path.unlink()


def _lock(file: Any, *, wait: bool) -> bool:
    """Whether the file is locked now; `False` too where there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where folders can be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
