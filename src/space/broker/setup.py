"""What root does to an installation beside serving it: import templates, and take everything down for the night."""

import shutil
from pathlib import Path

from space.broker.defaults import Defaults
from space.broker.host import Account, Host
from space.broker.journal import RESIDENT, Entry, Journal, Phase
from space.broker.locks import exclusive
from space.broker.templates import Template
from space.drivers import processes
from space.drivers.base import Need
from space.errors import HostError
from space.settings import Settings

_ROOT = Account(0, 0)
KILL_S = 10.0


async def import_template(settings: Settings, source: Path, name: str, tag: str, defaults: Defaults) -> Template:
    """Import a root file system, a tar or a directory, as ``name:tag``. Idempotent; the broker may run or not."""
    host = await _host(settings)
    await host.open_store()
    return await host.templates.add(source, name, tag, defaults)


async def list_templates(settings: Settings) -> list[Template]:
    return (await _host(settings)).templates.all()


async def unmount(settings: Settings) -> None:
    """End all machines and remove every trace of the installation from the running host; disks, images and journals
    stay.

    Machines that ran are found `exited` (`host-lost`) by the next broker, as after a reboot. Raise `Unavailable`
    while a broker runs.
    """
    if not settings.broker_dir.is_dir():
        return
    async with exclusive(settings.broker_dir / "lock", wait_s=5, busy="The broker is running; stop it first."):
        host = await _host(settings)
        journal = Journal(settings.broker_dir / "machines")
        journal.open()
        found = journal.read_all()
        for entry in found.entries.values():
            await _end(host, journal, entry)
        # SAFETY: the lock says that no broker runs. What is ended and removed is what the journal records and what
        # bears the instance's name; directories are the settings' own, which root alone may write into.
        for name in host.cgroups.known():
            await host.cgroups.remove(name)
        host.cgroups.remove_all()
        for name in host.links.known():
            await host.links.delete(name, None)
        await host.links.sweep(set())
        await host.links.close()
        await host.close_store()
        for directory in (settings.channels_dir, settings.run_dir / "broker"):
            shutil.rmtree(directory, ignore_errors=True)


async def _end(host: Host, journal: Journal, entry: Entry) -> None:
    # A machine that stands still dies only once it goes on.
    await host.cgroups.freeze(entry.body, still=False)
    # SAFETY: the journal, root's alone, names a process with its start time, so a recycled pid is not hit.
    if entry.process and not await processes.kill(entry.process, KILL_S):
        raise HostError("A machine's process does not end.", code="machine-stuck", machine=entry.machine)
    await host.release(entry, None)
    if entry.phase in RESIDENT | {Phase.PAUSING, Phase.RESUMING, Phase.SNAPSHOTTING}:
        journal.write(entry.to(Phase.EXITED, process=None, link=None, cause="host-lost"))


async def _host(settings: Settings) -> Host:
    settings.broker_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    host = Host(settings, _ROOT, frozenset(Need))
    await host.templates.open()
    return host
