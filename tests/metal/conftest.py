"""Says how many kernel tests this machine could not run."""

from __future__ import annotations

import pytest
import simulator


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A suite without its simulator must not look like one with it."""
    reason = simulator.missing()
    count = sum(str(reason) in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if count:
        terminalreporter.write_line(f"{count} kernel tests were skipped: {reason}")
