"""One stage: a command with a time-out, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TAIL_CHARACTERS = 3000
_GRACE_SECONDS = 5.0  # between asking a stage to end and ending it


@dataclass
class Stage:
    """What is to be run.

    `needs` names earlier stages without whose success it is skipped; `why_not` is a reason to skip it that is known before. `json_result`: its
    output ends with JSON, which is kept whole.
    `says_why_it_cannot`: given the exit status and the output, why the stage could not do its work; empty if it did.
    """

    name: str
    command: Sequence[str]
    limit: float
    needs: Sequence[str] = ()
    why_not: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    json_result: bool = False
    says_why_it_cannot: Callable[[int, str], str] | None = None


class Running:
    """A stage that has been started. Its processes are a session of their own, so that all of them end with it."""

    def __init__(self, stage: Stage, environment: Mapping[str, str]) -> None:
        self.stage = stage
        self._begin = time.monotonic()
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by finish())
        self._failure = ""
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                list(stage.command),
                env={**environment, **stage.environment},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._failure = str(error)

    def finish(self, seconds: float) -> tuple[dict[str, Any], str]:
        """Wait, at most so long, and return the stage's record and its whole output."""
        status, code = "failed", None
        if self._process is not None:
            try:
                code = self._process.wait(max(seconds, 0.1))
                status = "passed" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timed out"
            self._end_all()
        self._output.seek(0)
        text = self._output.read() + self._failure
        self._output.close()
        record: dict[str, Any] = {
            "stage": self.stage.name,
            "status": status,
            "seconds": round(time.monotonic() - self._begin, 1),
            "exit_status": code,
        }
        if counts := test_counts(text):
            record["tests"] = counts
            if status == "passed" and counts["passed"] == 0:
                record |= {"status": "skipped", "why": _reason(text)}
        if self.stage.json_result and (result := _json_in(text)) is not None:
            record["result"] = result
            if status == "passed" and isinstance(result, dict) and result.get("available") is False:
                record |= {"status": "skipped", "why": result.get("why", "")}
            elif status == "failed" and isinstance(result, dict) and "failed" in result:
                record["why"] = result["failed"]
        else:
            record["tail"] = text[-TAIL_CHARACTERS:]
        if code is not None and self.stage.says_why_it_cannot and (why := self.stage.says_why_it_cannot(code, text)):
            record |= {"status": "skipped", "why": why}
        return record, text

    def _end_all(self) -> None:
        """What the stage left running must not disturb the next one."""
        assert self._process is not None
        for number in (signal.SIGINT, signal.SIGKILL):  # interrupted, pytest still prints what has failed
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            try:
                self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def skipped(stage: Stage, why: str) -> dict[str, Any]:
    return {"stage": stage.name, "status": "skipped", "seconds": 0.0, "why": why}


def test_counts(text: str) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by the closing lines of GoogleTest or pytest; empty where there are none."""
    google = re.search(r"^\[  PASSED  \] (\d+) test", text, re.MULTILINE)
    if google:
        found = {"passed": int(google[1])}
        for name, mark in (("failed", "FAILED "), ("skipped", "SKIPPED")):
            match = re.search(rf"^\[  {mark} \] (\d+) test", text, re.MULTILINE)
            found[name] = int(match[1]) if match else 0
        return found
    closing = re.findall(r"^(?=.*\b(?:passed|failed|skipped|error))=*(.*) in [\d.]+s", text, re.MULTILINE)
    if not closing:
        return {}
    words = {"passed": ("passed",), "failed": ("failed", "errors?"), "skipped": ("skipped",)}
    return {
        name: sum(int(count) for word in each for count in re.findall(rf"(\d+) {word}\b", closing[-1]))
        for name, each in words.items()
    }


def _reason(text: str) -> str:
    match = re.search(r"(?:no GPU|no NCCL|not built): [^\n]*|(?<=: )about GPUs alone[^\n]*", text)
    return match[0] if match else "every test was skipped"


def _json_in(text: str) -> Any:
    """The last JSON on lines of its own, one or many; None if there is none. Libraries may complain behind it when the process ends."""
    found, end = None, 0
    for match in re.finditer(r"^[{\[]", text, re.MULTILINE):
        if match.start() < end:
            continue
        with contextlib.suppress(ValueError):
            value, after = json.JSONDecoder().raw_decode(text, match.start())
            if not text[after:].partition("\n")[0].strip():
                found, end = value, after
    return found
