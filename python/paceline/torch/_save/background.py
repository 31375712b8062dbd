"""The thread that writes a save while training goes on."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from paceline import Timeout
from paceline.torch._devices.failures import noted


class _Outcome:
    path: Path | None = None
    error: BaseException | None = None
    raised = False  # whether somebody has got the error
    dropped = False  # whether nobody can get it any more


class PendingSave:
    """A save that is being written: what `DataParallel.save_async` returns. A program that ends waits for it."""

    def __init__(self, write: Callable[[], Path]) -> None:
        self._outcome = outcome = _Outcome()
        # The thread does not refer to this object. So this object is dropped when nobody can ask for an error any more.
        self._thread = threading.Thread(target=_run, args=(write, outcome), name="paceline save", daemon=False)
        self._thread.start()
        weakref.finalize(self, _drop, outcome)

    @property
    def done(self) -> bool:
        """Whether the save is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the save is complete and on the disk.

        Parameters
        ----------
        timeout
            Seconds to wait at most. None: no limit.

        Returns
        -------
        pathlib.Path
            The folder of the save.

        Raises
        ------
        OSError
            If it could not be written, as on a full disk. Earlier saves are as before.
        Timeout
            If it is still being written after `timeout`. It goes on.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise Timeout(f"wait: the save is still being written after {timeout} s. It goes on; wait again.")
        self.raise_once(again=True)
        assert self._outcome.path is not None
        return self._outcome.path

    def join(self) -> None:
        """Wait for the end, whatever it is."""
        self._thread.join()

    def raise_once(self, *, again: bool = False) -> None:
        """Raise the error of a save that has ended, unless somebody has got it. `again`: also then."""
        error = self._outcome.error
        if error is not None and (again or not self._outcome.raised):
            self._outcome.raised = True
            raise error

    def __repr__(self) -> str:
        state = "being written"
        if self.done:
            state = f"failed: {self._outcome.error!r}" if self._outcome.error is not None else str(self._outcome.path)
        return f"<paceline.torch.PendingSave: {state}>"


def _run(write: Callable[[], Path], outcome: _Outcome) -> None:
    try:
        outcome.path = write()
    except BaseException as error:
        outcome.error = noted(error, "save_async: this save could not be written. Earlier saves are as before.")
        if outcome.dropped:
            _warn_of(outcome)


def _drop(outcome: _Outcome) -> None:
    """When a save is dropped, or at the program's end."""
    outcome.dropped = True
    if outcome.error is not None and not outcome.raised:
        _warn_of(outcome)


def _warn_of(outcome: _Outcome) -> None:
    warnings.warn(f"save_async: a save could not be written: {outcome.error!r}", RuntimeWarning, stacklevel=2)


class Saver:
    """Writes one save at a time."""

    def __init__(self) -> None:
        self._last: PendingSave | None = None

    def start(self, write: Callable[[], Path]) -> PendingSave:
        """Let a thread call `write`. Requires: `finish` was called."""
        self._last = PendingSave(write)
        return self._last

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._last is not None:
            self._last.join()

    def finish(self) -> None:
        """Wait until nothing is being written, and raise the error of the last save, unless somebody has got it."""
        self.join()
        last, self._last = self._last, None
        if last is not None:
            last.raise_once()
