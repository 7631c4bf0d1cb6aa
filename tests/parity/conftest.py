"""Runs where verl is installed (``make parity``) and is not collected anywhere else."""

from __future__ import annotations

import importlib.util

import pytest

from tests.parity import record

HAS_VERL = importlib.util.find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["test_*.py"]


def pytest_report_header() -> str:
    return "parity with verl: " + ("on" if HAS_VERL else "off, verl is missing; run `make parity`")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if record.TABLE:
        terminalreporter.section("parity")
        for line in record.lines():
            terminalreporter.write_line(line)
