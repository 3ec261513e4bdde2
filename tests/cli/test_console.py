"""The streams of a command: which lines of the library's log a command shows."""

from __future__ import annotations

import logging

import pytest

from qtrace.cli.console import Console, as_flags
from qtrace.cli.program import group


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_shows_warnings_of_the_library_also_if_quiet(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("qtrace")
    before = logger.level, logger.propagate, list(logger.handlers)
    with Console(quiet=quiet).work():
        logger.info("a detail that the user of this command does not need")
        logger.warning("%d layers are wrong", 3)
        logger.warning("%d layers are wrong", 3)  # as data that are read again have the same faults
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "warning: 3 layers are wrong\n")
    assert (logger.level, logger.propagate, logger.handlers) == before


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_that_asks_for_details_shows_them_unless_quiet(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Console(quiet=quiet).work(logging.INFO):
        logging.getLogger("qtrace").info("a step of %d", 3)
    assert capsys.readouterr().err == ("" if quiet else "a step of 3\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "go on with resume=True, or begin anew with force=True.",
            "go on with --resume, or begin anew with --force.",
        ),
        ("max_drop= limits a loss: give metric=, too.", "--max-drop limits a loss: give --metric, too."),
        ("write it with allow_broken=True.", "write it with --allow-broken."),
        ('take it by sort="noise" or not', "take it by --sort noise or not"),
        ("data=[1] and out=x.onnx stay, and so does no_option=True", None),
    ],
)
def test_options_that_a_message_names_are_those_of_the_command_line(text: str, shown: str | None) -> None:
    assert as_flags(text, group) == (shown or text)
