"""Terminal output: a live line on a terminal, plain lines elsewhere, no colour if unwanted."""

import io
import sys

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


def test_without_a_terminal_lines_are_plain_and_few(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = make_terminal(is_main=True)
    for step in range(100):
        terminal.progress(f"step {step}")
    terminal.log_summary({"best": "top-1 0.98"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "a line every ten seconds"
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
