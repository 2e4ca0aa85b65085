"""What waiting is made of, once for asyncio and once for threads: the only code of the SDK written in both forms.

Both modules offer the same names: ``Condition``, ``Lock``, ``Socket``, ``in_thread``, ``sleep``,
``wait_on``.
"""

IDLE_S = 20.0
"""After so long without a frame the other side is asked whether it is there; after as long again it is given up."""
OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
QUEUE_FRAMES_MAX = 8


class Disconnected(Exception):
    """A connection could not be made or has ended. Whether that matters is the caller's to say."""
