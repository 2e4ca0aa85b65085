"""Starts a Python kernel: IPython as agents want it, plain texts and no history on the disk."""

import sys

import space_kernel
from ipykernel.kernelapp import IPKernelApp

# Cells import from their own directory, and not from that of this file.
sys.path[0] = ""


class Application(IPKernelApp):
    """A kernel that throws away none of its messages, however slow they are taken."""

    def init_iopub(self, context):
        context.sndhwm = 0
        return super().init_iopub(context)


def main() -> None:
    app = Application.instance()
    app.config.HistoryManager.enabled = False
    app.config.InteractiveShell.colors = "nocolor"
    app.initialize()
    space_kernel.install(app.shell)
    app.start()


if __name__ == "__main__":
    main()
