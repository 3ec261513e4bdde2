"""The streams of a command: what the library logs is noted by every command."""

from __future__ import annotations

import logging

import pytest

from qtrace.cli.console import Console


@pytest.mark.parametrize("quiet", [False, True])
def test_the_log_of_the_library_is_noted_within_a_command(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("qtrace")
    before = logger.level, logger.propagate, list(logger.handlers)
    with Console(quiet=quiet).work():
        logger.info("a step of %d", 3)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "" if quiet else "a step of 3\n")
    assert (logger.level, logger.propagate, logger.handlers) == before
