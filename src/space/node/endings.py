"""How a request may end without an answer, or with half of one."""


class ClientGone(Exception):
    """The client closed its connection; nobody is there to be answered."""


class BrokenOff(Exception):
    """An answer that has begun cannot be completed: the connection is closed so that the client sees it."""
