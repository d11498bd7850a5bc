"""Terminal output: a live line on a terminal, plain lines elsewhere, no colour if unwanted."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import count
from pathlib import Path

import pytest

from pipeline.record.terminal import QUIET, make_terminal


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_tty(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """Make standard error a terminal; no fixture, because pytest replaces it before each test."""
    screen = Tty()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def test_on_a_terminal_progress_is_one_line_that_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = make_tty(monkeypatch)
    terminal = make_terminal(is_main=True)
    terminal.progress("step 1")
    terminal.progress("step 2")
    terminal.log("validation")
    assert tty.getvalue() == "step 1\r      \rstep 2\r      \rvalidation\n"


def test_the_summary_has_colour_on_a_terminal_and_none_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = make_tty(monkeypatch)
    make_terminal(is_main=True).log_summary({"best": "top-1 0.98"})
    assert "\x1b[1mbest\x1b[0m" in tty.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    make_terminal(is_main=True).log_summary({"report": "runs/x/report"})
    assert tty.getvalue().endswith("  report  runs/x/report\n")


def test_without_a_terminal_lines_are_plain_and_few(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(100.0, 0.25)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    terminal = make_terminal(is_main=True)
    for step in range(100):
        terminal.progress(f"step {step}")
    terminal.log_summary({"best": "top-1 0.98"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, "a line every ten seconds, and the summary"
    assert not [line for line in lines if "\x1b" in line or "\r" in line]


def test_quiet_ranks_and_all_ranks_but_the_main_one_print_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUIET, "1")
    for terminal in (make_terminal(is_main=True), make_terminal(is_main=False)):
        terminal.log("line")
        terminal.show("table")
        terminal.progress("step 1")
        terminal.log_summary({"best": "top-1 0.98"})
    assert capsys.readouterr().err == ""


def test_a_narrow_terminal_shows_the_most_important_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    tty = make_tty(monkeypatch)
    make_terminal(is_main=True).progress(" 42%", "epoch 3/7", "step 42/100", "lr 0.1")
    assert tty.getvalue() == " 42%  epoch 3/7  step 42/100"


def test_training_shows_percent_and_best_so_far_and_the_progress_of_validation(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", "train.epochs=2", "run.threads=1", "track.uri=none", "track.report=false"]
    command = [sys.executable, "-m", "pipeline", "train", *words]
    screen = bytearray()
    main, end = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with subprocess.Popen(command, cwd=tmp_path, stderr=end, stdout=subprocess.PIPE) as process:
        os.close(end)
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(main, 65536):
                screen += part
        assert process.wait() == 0
    os.close(main)
    lines = screen.decode().replace("\n", "\r").split("\r")
    assert [line for line in lines if re.match(r"validation 100%  360 images", line)]
    shown = [line for line in lines if " left  " in line]
    assert re.match(r" {1,2}\d+%  epoch 1/2  step \d+/28  loss [\d.]+  .* left  [\d,]+ images/s  lr ", shown[0])
    assert re.match(
        r"100%  epoch 2/2  step 28/28  loss [\d.]+  0 s left  best top-1 0\.\d{4}  [\d,]+ images/s", shown[-1]
    )
    in_place = [line for line in lines[lines.index(shown[0]) :] if not re.match(r"\s*\d{4}-", line)]
    assert max(map(len, in_place)) < 120
