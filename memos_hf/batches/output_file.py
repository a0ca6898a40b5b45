"""A file of finished requests, one JSON object a line, that a run which was cut off is taken up from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from .requests import BatchOutput, Request

FIELDS = frozenset(BatchOutput.__dataclass_fields__) | {"prompt_hash"}


class OutputFile:
    """Finished requests on disk, appended and flushed as they come.

    Parameters
    ----------
    path : str or Path, optional
        Made if there is none. A last line that was not written to its end is taken off. `None`: nothing is written.
    settings : mapping
        What all requests share; part of the hash by which they are known again.

    Raises
    ------
    ValueError
        If there is no such folder, or the file holds something else; it is then as it was.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._records: dict[int, dict[int, dict[str, Any]]] = {}
        self._file: BinaryIO | None = None
        if path is None:
            return
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"output_file: expected a file in a folder that exists, got {str(path)!r}")
        whole = self._read() if self.path.exists() else b""
        self._file = self.path.open("ab")
        self._file.truncate(len(whole))

    def finished(self, request: Request, copies: int) -> list[BatchOutput] | None:
        """What is there of a request, if all of it is and it is the same request."""
        digest = request.digest(self._settings)
        outputs = [
            _output(record, request.prompt)
            for _, record in sorted(self._records.get(request.index, {}).items())
            if record["prompt_hash"] == digest and record["error"] is None
        ]
        return outputs if len(outputs) == copies else None

    def append(self, outputs: Sequence[BatchOutput], request: Request | None = None) -> None:
        """Write what became of a request (`None`: nothing but errors); what is there already is not written again."""
        if self._file is None:
            return
        digest = request.digest(self._settings) if request is not None else None
        for output in outputs:
            known = self._records.get(output.index, {}).get(output.sequence)
            if output.error is not None and known is not None and known["error"] == output.error:
                continue
            record = {**asdict(output), "prompt_hash": digest}
            self._file.write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        """Take in the records; return the lines that hold them."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        expected = "output_file: expected lines that generate_batch wrote"
        for number, line in enumerate(whole.splitlines(), start=1):
            record = _record(line)
            if record is None:
                raise ValueError(f"{expected}, got another as line {number} of {self.path}")
            self._records.setdefault(record["index"], {})[record["sequence"]] = record
        if not whole and content and not b'{"index": '.startswith(content[:10]):
            raise ValueError(f"{expected}, got none in {self.path}")
        return whole


def _output(record: Mapping[str, Any], prompt: Any) -> BatchOutput:
    fields = {name: value for name, value in record.items() if name != "prompt_hash"}
    return replace(BatchOutput(**fields), prompt=prompt)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() == FIELDS else None
