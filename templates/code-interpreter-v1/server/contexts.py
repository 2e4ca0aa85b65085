"""Contexts: kernels, each of which runs one cell at a time and remembers what earlier ones left."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

import languages
import outputs
from executions import Execution, Progress, Time
from kernels import Kernel, KernelGone
from languages import Language, Values

ENVIRONMENT = Path("/run/space/environment")
"""What the sandbox's programs have in their environment, as its agent wrote it."""
HOME = "/home/user"
DEFAULT = "default"
"""The id by which the first Python context is found, too."""
CONTEXTS_MAX = 32
WAITING_MAX = 64
"""Cells of one context that have not ended."""
ASIDE_S = 10.0
"""For what a kernel is told beside cells."""
AHEAD_BYTES_MAX = 8 * 1024 * 1024
"""How far a kernel may be ahead of who takes what it says, before it is made to wait."""


class Refused(Exception):
    """A request that cannot be carried out, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Context:
    """A kernel, or one after the other, from `open` to `close`."""

    def __init__(self, language: Language, cwd: str, context_id: str) -> None:
        self.id = context_id
        self.language = language
        self.cwd = cwd
        self._turn = asyncio.Lock()
        """Of the cell that runs."""
        self._changing = asyncio.Lock()
        """While it begins anew or ends; cells that are asked for meanwhile come after that."""
        self._running: dict[asyncio.Task[None], Execution] = {}
        self._held: set[asyncio.Task[None]] = set()
        """Those of them that wait for a change to be over, so that no change may wait for them."""
        self._kernel: Kernel | None = None
        self._interruptible = False
        self._closed = False
        self._environment: dict[str, str] = {}
        self._begun = False

    def shown(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language.name, "cwd": self.cwd}

    async def open(self) -> None:
        """Start the kernel and wait until it answers. Raises ``Refused`` when it does not."""
        async with self._changing:
            await self._opened()

    async def close(self) -> None:
        """End the kernel, and every cell of it with an error."""
        async with self._changing:
            self._closed = True
            await self._end_all()

    async def restart(self) -> None:
        """Begin again with nothing remembered, whatever the kernel is at."""
        async with self._changing:
            if self._closed:
                raise Refused(404, f"Context {self.id} not found")
            await self._end_all()
            await self._opened()

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, if one does."""
        if self._kernel is not None and self._interruptible:
            await self._kernel.interrupt()

    def start(self, code: str, env: Values, timeout_s: float | None) -> Execution:
        """Have a cell run when those before it are done. Raises ``Refused`` when too many wait already."""
        if len(self._running) >= WAITING_MAX:
            raise Refused(429, f"{WAITING_MAX} cells of this context have not ended: wait for them or restart it")
        execution = Execution(code, env, timeout_s)
        task = asyncio.create_task(self._run(execution))
        self._running[task] = execution
        task.add_done_callback(self._running.pop)
        return execution

    async def _opened(self) -> None:
        try:
            await self._start()
        except KernelGone as error:
            raise Refused(500, str(error)) from error

    async def _start(self) -> Kernel:
        self._environment, self._begun = read_environment(), False
        kernel = self._kernel = Kernel(self.language)
        try:
            await kernel.start(self.cwd, {**os.environ, **self._environment})
        except KernelGone:
            self._kernel = None
            raise
        return kernel

    async def _end_all(self) -> None:
        """End the kernel, and every cell that was asked for so far."""
        for execution in self._running.values():
            execution.void = True
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await kernel.end()
        if running := set(self._running) - self._held:
            await asyncio.wait(running)

    async def _run(self, execution: Execution) -> None:
        try:
            # One that the change has ended already has its turn at once, to say so.
            if self._changing.locked() and not execution.void:
                await self._changed()
            async with self._turn:
                if not execution.given_up:
                    await self._carry_out(execution)
        except KernelGone as error:
            execution.tell(outputs.error("KernelGone", str(error)))
        except Exception as error:
            execution.tell(outputs.error("InterpreterError", f"The code interpreter broke: {error!r}"))
            raise
        finally:
            execution.tell(outputs.END)

    async def _changed(self) -> None:
        """Return when the change under way is over."""
        task = asyncio.current_task()
        assert task is not None
        self._held.add(task)
        try:
            async with self._changing:
                pass
        finally:
            self._held.discard(task)

    async def _carry_out(self, execution: Execution) -> None:
        if execution.void or self._closed:
            raise KernelGone("The context was restarted or ended before the cell had its turn.")
        kernel = self._kernel or await self._start()
        try:
            await self._prepare(kernel)
            if execution.env:
                await self._aside(kernel, self.language.lend(execution.env))
            await self._cell(kernel, execution)
            if execution.env:
                await self._aside(kernel, self.language.take_back(execution.env))
        except KernelGone:
            if self._kernel is kernel:
                self._kernel = None
            await kernel.end()
            raise

    async def _prepare(self, kernel: Kernel) -> None:
        """Have the kernel in the sandbox that it is in now: what runs here may be a copy of what ran elsewhere."""
        if not self._begun and self.language.begin:
            await self._aside(kernel, self.language.begin)
        self._begun = True
        now = read_environment()
        values: dict[str, str | None] = {name: None for name in self._environment if name not in now}
        values |= {name: value for name, value in now.items() if self._environment.get(name) != value}
        if values:
            await self._aside(kernel, self.language.change(values))
            self._environment = now

    async def _aside(self, kernel: Kernel, code: str) -> None:
        """Have code run that nobody sees. Raises ``KernelGone`` when the kernel does not, as it has nothing else to do."""
        try:
            async with asyncio.timeout(ASIDE_S):
                await self._cell(kernel, Execution(code, {}, None), silent=True)
        except TimeoutError as error:
            raise KernelGone("The kernel does not answer any more; what it remembered is gone.") from error

    async def _cell(self, kernel: Kernel, execution: Execution, *, silent: bool = False) -> None:
        """Run code to its end, telling what comes of it; it is interrupted when it is given up or takes too long."""
        progress = Progress(kernel.execute(execution.code, silent=silent), self.language.silence_s)
        failed = False
        lag_s = 0.0 if silent else self.language.lag_s
        time = Time(execution)
        self._interruptible = not silent
        try:
            while not progress.done or lag_s:
                if not progress.replied:
                    await time.see_to(kernel)
                await _pace(kernel, execution)
                said = await kernel.said(execution.wake, lag_s if progress.done else time.wait_s())
                if said is None and progress.done:
                    break
                if said is None:
                    await kernel.check()
                    progress.silence()
                elif progress.take(said) and not silent:
                    for event in outputs.events_of(said.kind, said.content):
                        failed = failed or event["type"] == "error"
                        execution.tell(event)
        finally:
            self._interruptible = False
            kernel.hush()
            if kernel.stopped:
                await kernel.go_on()
        if not silent and not failed and (problem := progress.problem()) is not None:
            execution.tell(problem)


async def _pace(kernel: Kernel, execution: Execution) -> None:
    """Stop a kernel that is too far ahead, and let it go on when that has been taken."""
    if not kernel.stopped and execution.bytes_ahead > AHEAD_BYTES_MAX:
        await kernel.stop()
    elif kernel.stopped and execution.bytes_ahead < AHEAD_BYTES_MAX // 2:
        await kernel.go_on()


class Contexts:
    """All contexts by id, and for each language the one that is used by those who name none."""

    def __init__(self) -> None:
        self._known: dict[str, Context] = {}
        self._defaults: dict[str, str] = {}
        self._looking = {name: asyncio.Lock() for name in languages.names()}
        """While the one of a language is started, which takes more memory than there is for one each who waits."""
        self._opening = 0
        self._begun = False

    def all(self) -> list[Context]:
        return list(self._known.values())

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """Start a context. Raises ``Refused``."""
        known = _known(language)
        directory = os.path.normpath(os.path.join(HOME, cwd or ""))
        if not os.path.isdir(directory):
            raise Refused(400, "The directory does not exist")
        if len(self._known) + self._opening >= CONTEXTS_MAX:
            raise Refused(429, f"There are {CONTEXTS_MAX} contexts already: delete one first")
        context = Context(known, directory, str(uuid.uuid4()))
        self._opening += 1
        try:
            await context.open()
        finally:
            self._opening -= 1
        self._known[context.id] = context
        return context

    async def find(self, context_id: str) -> Context:
        """Return a context by its id; the default one is started at its first use. Raises ``Refused``."""
        found = await self.default() if context_id == DEFAULT else self._known.get(context_id)
        if found is None:
            raise Refused(404, f"Context {context_id} not found")
        return found

    async def default(self, language: str | None = None) -> Context:
        """Return the context of a language for those who name none, started at its first use."""
        name = _known(language).name
        async with self._looking[name]:
            context = self._known.get(self._defaults.get(name, ""))
            if context is None:
                context = await self.create(name, None)
                self._defaults[name] = context.id
            return context

    async def begin(self) -> None:
        """Start the first context, once, and have one for JavaScript, whose kernel is started with its first cell."""
        if self._begun:
            return
        await self.default()
        self._begun = True
        known = _known("javascript")
        if known.name not in self._defaults:
            context = Context(known, HOME, str(uuid.uuid4()))
            self._known[context.id] = context
            self._defaults[known.name] = context.id

    async def delete(self, context_id: str) -> None:
        context = await self.find(context_id)
        self._known.pop(context.id, None)
        await context.close()


def _known(language: str | None) -> Language:
    known = languages.find(language or languages.PYTHON.name)
    if known is None:
        raise Refused(400, f"There is no kernel for this language. There are: {', '.join(languages.names())}")
    return known


def read_environment() -> dict[str, str]:
    """Return the variables that every program of the sandbox has, as far as all kernels can have them."""
    try:
        text = ENVIRONMENT.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
    return {name: value for name, _, value in pairs if languages.NAME.fullmatch(name)}
