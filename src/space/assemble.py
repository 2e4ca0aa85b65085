"""Where concrete parts are put together.

``python -m space.assemble api|node|broker`` serves one process in the foreground.
"""

import argparse
import asyncio

from space import logs
from space import settings as settings_module
from space.settings import Settings


async def serve_api(settings: Settings) -> None:
    from space.api.server import serve

    await serve(settings)


async def serve_node(settings: Settings) -> None:
    from space.node.server import serve

    await serve(settings)


async def serve_broker(settings: Settings) -> None:
    from space.broker import doctor
    from space.broker.server import serve
    from space.drivers.gvisor import GVisorDriver
    from space.errors import HostError

    runsc = doctor.find_runsc(settings)
    if runsc is None:
        raise HostError("runsc is not installed: run scripts/up once.", code="no-runsc")
    gvisor = GVisorDriver(runsc, settings.run_dir / "broker", settings.guest_dir)
    await serve(settings, {gvisor.name: gvisor})


PROCESSES = {"api": serve_api, "node": serve_node, "broker": serve_broker}


def main() -> None:
    """Serve the process named on the command line until it is told to stop."""
    parser = argparse.ArgumentParser(prog="python -m space.assemble", description=main.__doc__)
    parser.add_argument("process", choices=sorted(PROCESSES))
    chosen = parser.parse_args().process
    settings = settings_module.load()
    logs.configure(settings.log_level)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(PROCESSES[chosen](settings))


if __name__ == "__main__":
    main()
