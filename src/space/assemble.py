"""Where concrete parts are put together.

``python -m space.assemble api|node|gateway|broker`` serves one process in the foreground.
"""

import argparse
import asyncio
from typing import TYPE_CHECKING

from space import logs, tracing
from space import settings as settings_module
from space.settings import Settings

if TYPE_CHECKING:
    from space.drivers.base import Driver


async def serve_api(settings: Settings) -> None:
    from space.api.server import serve
    from space.e2b.server import serve as serve_e2b

    await serve(settings, serve_e2b)


async def serve_node(settings: Settings) -> None:
    from space.node.server import serve

    await serve(settings)


async def serve_gateway(settings: Settings) -> None:
    from space.egress.server import serve

    await serve(settings)


async def serve_broker(settings: Settings) -> None:
    from space.broker.server import serve

    await serve(settings, drivers(settings))


def drivers(settings: Settings) -> "dict[str, Driver]":
    """Return, by name, the drivers whose programs this host has. Raise `HostError` when there is none.

    Whether one really works is another question, which `space doctor` answers.
    """
    from space.broker import installed
    from space.drivers.firecracker import FirecrackerDriver
    from space.drivers.gvisor import GVisorDriver
    from space.drivers.qemu import QemuDriver
    from space.errors import HostError

    state, guest, runtimes = settings.run_dir / "broker", settings.guest_dir, settings.broker_dir / "runtimes"
    found: dict[str, Driver] = {}
    if runsc := installed.find_runsc(settings):
        found[GVisorDriver.name] = GVisorDriver(runsc, state, guest)
    machines_run = installed.find_kernel(settings) and not installed.missing_disk_tools()
    if machines_run and installed.find_qemu():
        found[QemuDriver.name] = QemuDriver(settings.kernel, guest, runtimes, state)
    if machines_run and (programs := installed.find_firecracker(settings)):
        found[FirecrackerDriver.name] = FirecrackerDriver(
            programs, settings.kernel, guest, runtimes, state, cpu_template=settings.firecracker_cpu_template
        )
    if not found:
        raise HostError("No driver can be had on this host: run scripts/up once.", code="no-driver")
    return found


def configure_tracing(process: str, settings: Settings) -> None:
    """Export traces where the settings say so. The broker is root and speaks to no network: the node exports for it."""
    if process == "broker":
        return
    try:
        tracing.configure(f"space-{process}", settings.instance, settings.otlp_endpoint)
    except ImportError as error:
        from space.errors import HostError

        raise HostError(
            "otlp_endpoint is set, but OpenTelemetry is not installed: install space-sandbox[otlp].", code="no-otlp"
        ) from error


PROCESSES = {"api": serve_api, "node": serve_node, "gateway": serve_gateway, "broker": serve_broker}


def main() -> None:
    """Serve the process named on the command line until it is told to stop."""
    parser = argparse.ArgumentParser(prog="python -m space.assemble", description=main.__doc__)
    parser.add_argument("process", choices=sorted(PROCESSES))
    chosen = parser.parse_args().process
    settings = settings_module.load()
    logs.configure(settings.log_level)
    configure_tracing(chosen, settings)
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(logs.note_from_loop)
            runner.run(PROCESSES[chosen](settings))
    finally:
        tracing.close()


if __name__ == "__main__":
    main()
