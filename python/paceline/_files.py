"""Write files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str, *, errors: str = "strict") -> None:
    """Write text as UTF-8. An existing file is replaced when the new one is complete; of a link, the file that it names.

    What exists and is no regular file, such as ``/dev/stdout``, is written to.

    Raises
    ------
    OSError
        If it cannot be written. An existing file is then as before.
    """
    given = Path(path)
    if given.exists() and not given.is_file():
        given.write_text(text, encoding="utf-8", errors=errors)
        return
    target = os.path.realpath(path)
    unfinished = Path(f"{target}.unfinished-{os.getpid()}-{threading.get_native_id()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors=errors)
        unfinished.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename == os.fspath(unfinished):
            error.filename = os.fspath(path)
        raise
