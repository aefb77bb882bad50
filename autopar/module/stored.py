"""Files of data that say whether they are as they were written.

autopar graph 1            the kind of data, and the version of its form
4c1f...                    a digest of what follows
...                        compressed JSON
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

from autopar.codegen.records import packed, unpacked
from autopar.letters import BadProgram

AGAIN = "plan.compile, or autopar compile, where the program is to run"


def write(path: Path, kind: str, data: Any) -> None:
    """Write data of a kind: whole, or not at all."""
    content = packed(data)
    written = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        written.write_bytes(b"\n".join((_mark(kind), _digest(content), content)))
        written.replace(path)
    except OSError as e:
        raise BadProgram(f"{path} cannot be written", seen=f"{type(e).__name__}: {e}") from e


def read(path: Path, kind: str) -> Any:
    """The data of a kind that was written; a letter where the file has none, or was edited."""
    try:
        mark, digest, content = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError) as e:
        raise BadProgram(f"{path} does not read as a {kind}", seen=f"{type(e).__name__}: {e}") from e
    if mark != _mark(kind):
        raise BadProgram(f"{path} is not a {kind} of this release", seen=repr(mark[:40]), advice=AGAIN)
    if _digest(content) != digest:
        raise BadProgram(f"the {kind} {path} was changed since it was written", advice=AGAIN)
    return unpacked(content)


def _mark(kind: str) -> bytes:
    """The first line of a file: the kind of its data, and the version of its form."""
    return f"autopar {kind} 1".encode()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
