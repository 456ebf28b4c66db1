"""python -m devicemesh COMMAND ...: the command line."""

import sys

USAGE = """\
usage: python -m devicemesh COMMAND ...

commands:
  run      run a script on several processes of this machine
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit code of the command named by the first argument."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else None
    if command == "run":
        from devicemesh.launch.run import main as run

        return run(arguments[1:])
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command is None:
        print(USAGE, end="", file=sys.stderr)
    else:
        print(f"{USAGE}\ndevicemesh: no command {command!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
