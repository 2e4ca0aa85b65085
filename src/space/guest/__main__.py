"""The agent on standard input and output, as an ordinary process.

``python -m space.guest [--cgroups DIRECTORY] [--sudo SOCKET]``
"""

from space.guest.agent import main

if __name__ == "__main__":
    main()
