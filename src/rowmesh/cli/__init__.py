"""The command line of rowmesh, a command a file."""

import typer

from rowmesh.cli.calibrate import calibrate_command
from rowmesh.cli.doctor import doctor_command
from rowmesh.cli.lab import lab_app
from rowmesh.cli.plan import plan_app
from rowmesh.cli.profile import profile_command
from rowmesh.cli.terminal import Commands
from rowmesh.cli.train import train_command
from rowmesh.cli.verify import verify_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="rowmesh",
    cls=Commands,
    help="Train recommendation models whose embedding tables outgrow a device.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs are filled to the width of the terminal
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("verify")(verify_command)
app.add_typer(plan_app, name="plan", help="Print the plan for a cluster; compare two plans.")
app.command("profile")(profile_command)
app.command("calibrate")(calibrate_command)
app.add_typer(lab_app, name="lab", help="Emulated hosts on this machine: run, check, clean up.")
app.command("doctor")(doctor_command)


@app.callback()
def rowmesh() -> None:
    """Train recommendation models whose embedding tables outgrow a device."""


def main() -> None:
    """The program `rowmesh`."""
    app()
