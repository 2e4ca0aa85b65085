"""One kernel: a process that runs code for one context, and what it says. Whatever runs in it can say anything."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq.asyncio
from jupyter_client import AsyncKernelClient, AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from languages import Language

SPECS = Path(__file__).with_name("specs")
START_S = 60.0
STOP_S = 10.0


class KernelGone(Exception):
    """The kernel has ended; its text says how."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message: its ``kind``, which request it belongs to, and what it holds."""

    kind: str
    request: str
    content: Mapping[str, Any]


class Kernel:
    """One process from `start` to `end`. What it says is read all the time; between cells it is thrown away, so that
    what goes on in the background fills nothing.

    It ends with this process, and before it where memory runs out: see ``specs``.
    """

    def __init__(self, language: Language) -> None:
        self._language = language
        self._manager: AsyncKernelManager | None = None
        self._client: AsyncKernelClient | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[Said] = asyncio.Queue()
        self._listening = False
        self._ended = asyncio.Event()
        self.stopped = False
        """Whether it is made to wait."""

    async def start(self, cwd: str, env: Mapping[str, str]) -> None:
        """Return once it answers. Raises ``KernelGone`` when it does not, or is ended meanwhile."""
        context = zmq.asyncio.Context()
        context.rcvhwm = 0
        path = f"{os.environ['JUPYTER_RUNTIME_DIR']}/{uuid.uuid4().hex}"
        manager = self._manager = AsyncKernelManager(
            kernel_name=self._language.kernel,
            transport=self._language.transport,
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(SPECS)], ensure_native_kernel=False),
            context=context,
            connection_file=f"{path}.json",
        )
        if self._language.transport == "ipc":
            manager.ip = path
        try:
            await manager.start_kernel(cwd=cwd, env=dict(env))
            client = self._client = manager.client()
            client.start_channels(hb=False, stdin=False)
            await self._unless_ended(client.wait_for_ready(timeout=START_S))
        except (RuntimeError, OSError, TimeoutError) as error:
            await self.end()
            raise KernelGone(f"The {self._language.name} kernel could not be started: {error}") from error
        if self._ended.is_set():
            await self.end()
            raise KernelGone("The kernel was ended while it started.")
        reads = (client.get_iopub_msg, client.get_shell_msg)
        self._readers = [asyncio.create_task(self._read(one)) for one in reads]

    def execute(self, code: str, *, silent: bool) -> str:
        """Ask for code to be run, listen to what comes of it, and return the request's name."""
        if self._client is None:
            raise KernelGone("The kernel was ended.")
        self._listening = True
        return self._client.execute(code, silent=silent, store_history=not silent, allow_stdin=False)

    def hush(self) -> None:
        """Listen no more: the cell is over."""
        self._listening = False
        while not self._inbox.empty():
            self._inbox.get_nowait()

    async def said(self, wake: asyncio.Event, wait_s: float) -> Said | None:
        """Return the next message; None when there is none in time, or ``wake`` is set meanwhile."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        if self._ended.is_set():
            raise KernelGone("The context was restarted or ended.")
        wake.clear()
        events = (self._inbox.get(), wake.wait(), self._ended.wait())
        waits = [asyncio.ensure_future(one) for one in events]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.wait(waits)
        return None if waits[0].cancelled() else waits[0].result()

    async def check(self) -> None:
        """Raise ``KernelGone`` when the process has ended."""
        status = None if self._manager is None else await self._manager.provisioner.poll()
        if status is not None or self._manager is None:
            raise KernelGone(f"The kernel {_how(status)}, and with it all that it remembered is gone.")

    async def interrupt(self) -> None:
        await self.go_on()
        if self._manager is not None:
            await self._manager.interrupt_kernel()

    async def stop(self) -> None:
        """Make it wait."""
        self.stopped = True
        await self._signal(signal.SIGSTOP)

    async def go_on(self) -> None:
        self.stopped = False
        await self._signal(signal.SIGCONT)

    async def end(self) -> None:
        """End it, whatever it is at. Again: no effect."""
        self._ended.set()
        readers, self._readers = self._readers, []
        client, self._client = self._client, None
        manager, self._manager = self._manager, None
        while readers:
            for task in readers:
                task.cancel()
            # Again, where what it awaits takes the first one for its own.
            _, readers = await asyncio.wait(readers, timeout=1)
        if client is not None:
            client.stop_channels()
        if manager is None:
            return
        try:
            if manager.has_kernel:
                await manager.signal_kernel(signal.SIGCONT)
                async with asyncio.timeout(STOP_S):
                    await manager.shutdown_kernel(now=True)
        except (RuntimeError, OSError, TimeoutError):
            pass  # It was killed; that it is waited for no longer is all there is to do.
        finally:
            manager.context.destroy(linger=0)

    async def _signal(self, number: int) -> None:
        if self._manager is not None and self._manager.has_kernel:
            await self._manager.signal_kernel(number)

    async def _unless_ended(self, work: Awaitable[None]) -> None:
        waits = [asyncio.ensure_future(work), asyncio.ensure_future(self._ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.wait(waits)
        if not waits[0].cancelled():
            waits[0].result()

    async def _read(self, receive: Callable[..., Awaitable[Any]]) -> None:
        while not self._ended.is_set():
            try:
                message = await receive(timeout=None)
            except zmq.ZMQError:
                return  # Closed.
            except Exception:  # noqa: BLE001, S112 - what runs in the kernel may have written it: it is nothing
                continue
            if self._listening and (said := _understood(message)) is not None:
                self._inbox.put_nowait(said)


def _understood(message: Any) -> Said | None:
    """Return what a message says; None for what is none."""
    if not isinstance(message, dict):
        return None
    header, parent, content = (message.get(name) for name in ("header", "parent_header", "content"))
    if not all(isinstance(one, dict) for one in (header, parent, content)):
        return None
    kind, request = header.get("msg_type"), parent.get("msg_id")
    return Said(kind, request, content) if isinstance(kind, str) and isinstance(request, str) else None


def _how(status: int | None) -> str:
    if status is None:
        return "was ended"
    if status == -signal.SIGKILL:
        return "was killed, as happens when the sandbox's memory runs out"
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
