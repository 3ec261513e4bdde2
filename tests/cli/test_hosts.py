"""--runtime-python, --runner and --runtime-timeout."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from qtrace.cli.options import runtime_host
from qtrace.runtimes.host import RuntimeHost


@click.command()
@runtime_host
def show(runtime_host: RuntimeHost | None) -> None:
    click.echo(repr(runtime_host))


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ([], None),
        (["--runtime-python", "/a/python"], RuntimeHost("/a/python")),
        (
            ["--runner", "ssh board python3", "--runtime-timeout", "5"],
            RuntimeHost(runner="ssh board python3", timeout=5.0),
        ),
    ],
)
def test_the_options_make_a_host(given: list[str], host: RuntimeHost | None) -> None:
    result = CliRunner().invoke(show, given, catch_exceptions=False)
    assert result.output.strip() == repr(host)


def test_runtime_timeout_without_a_host_is_refused() -> None:
    result = CliRunner().invoke(show, ["--runtime-timeout", "5"])
    assert result.exit_code == 2
    assert "--runtime-timeout belongs to --runtime-python or --runner" in result.output
