"""The agent on standard input and output, as an ordinary process.

``python -m space.guest [--cgroups DIRECTORY] [--sudo SOCKET]``, or instead the program ``unpack-layer [DIRECTORY]``
(see ``layers.py``).
"""

import sys


def main() -> None:
    if sys.argv[1:2] == ["unpack-layer"]:
        from space.guest.layers import main as serve
    else:
        from space.guest.agent import main as serve
    serve()


if __name__ == "__main__":
    main()
