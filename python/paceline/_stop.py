"""A flag that signals set, which a training loop looks at between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from paceline._core import InvalidArgument


class StopRequest:
    """Whether to stop, for a training loop to look at: ``if stop: save(); break``.

    Attributes
    ----------
    signal
        The number of the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._requested = False

    def __bool__(self) -> bool:
        return self._requested

    def request(self) -> None:
        """Ask for the stop without a signal, for a notice that comes another way. Any thread may call it."""
        self._requested = True

    def __repr__(self) -> str:
        came = f" by signal {self.signal}" if self.signal is not None else ""
        return f"<paceline.StopRequest: {'requested' + came if self._requested else 'not requested'}>"


_open: list[StopRequest] = []


def stop_requested() -> bool:
    """Whether any open `stop_on` has been asked to stop."""
    return any(_open)


@contextlib.contextmanager
def stop_on(*signals: signal.Signals | int) -> Iterator[StopRequest]:
    """Within the ``with`` block these signals ask for a stop instead of ending the program.

    A handler only sets a flag, so a step ends as usual, and the loop saves and leaves at the next look. Then the handler calls the one that
    was there before, if that is a function of yours. At the end of the block the earlier handlers are back. Handlers that are not Python's,
    such as those of `faulthandler.register`, are not: register them again. In a forked child the signals do what they do by default.

    Parameters
    ----------
    signals
        Such as ``signal.SIGTERM`` (what SLURM, Kubernetes and spot machines send) and ``signal.SIGUSR1``. None: only `StopRequest.request`
        sets the flag.

    Raises
    ------
    InvalidArgument
        If signals are given outside of the main thread, where Python takes none, or one that cannot be caught.

    Examples
    --------
    >>> with stop_on(signal.SIGTERM) as stop:                                       # doctest: +SKIP
    ...     for batch in loader:
    ...         trainer.step(loss_fn, batch)
    ...         if stop:
    ...             save(); break
    """
    if signals and threading.current_thread() is not threading.main_thread():
        raise InvalidArgument(
            "stop_on: Python takes signals on the main thread only, and this is another one (Ray's workers run there). Call stop_on(...) on the "
            "main thread, or stop_on() without signals here, and request() on what it returns when a notice comes."
        )
    stop = StopRequest()
    earlier: dict[int, object] = {}

    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a child, such as a worker of a pool, whose parent ends it by a signal
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if stop.signal is None:
            stop.signal = number
        stop.request()
        before = earlier.get(number)
        if callable(before) and before is not signal.default_int_handler:  # which would raise KeyboardInterrupt
            before(number, frame)

    try:
        for number in dict.fromkeys(signals):
            try:
                earlier[number] = signal.getsignal(number)
                signal.signal(number, handle)
            except (OSError, TypeError, ValueError) as error:
                earlier.pop(number, None)
                raise InvalidArgument(f"stop_on: signal {number!r} cannot be caught: {error}.") from error
        _open.append(stop)
        yield stop
    finally:
        if stop in _open:
            _open.remove(stop)
        for number, before in earlier.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)  # type: ignore[arg-type]
