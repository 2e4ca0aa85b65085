"""The operations that threads carry out, by the name the host calls them."""

from __future__ import annotations

from space.guest import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from space.guest.transfers import Operation, Task

_BY_NAME: dict[str, Operation] = {
    "file-read": files.file_read,
    "file-write": files.file_write,
    "stat": files.file_stat,
    "list-dir": files.list_dir,
    "mkdir": files.make_dir,
    "move": files.move,
    "remove": files.remove,
    "chmod": files.change_mode,
}


def find(op: str) -> Operation:
    """Return the function of an operation; those that need large modules bring them when first asked for."""
    if op in ("archive-read", "archive-write"):
        from space.guest import archives

        return archives.archive_read if op == "archive-read" else archives.archive_write
    return _watch if op == "watch" else _BY_NAME[op]


def _watch(task: Task) -> None:
    from space.guest.watches import Watch

    path = files.path_of(task)
    task.watch = Watch(path, task.identity, recursive=task.fields["recursive"], marks=task.fields["marks"])
