"""`space bench`."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from space.cli import show
from space.cli.targets import DriverOption, JsonOption, open_client

if TYPE_CHECKING:
    from space import Client


def bench(
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="How often each thing is done.")] = 10,
    template: Annotated[str, typer.Option("--template", help="The template to start from.")] = "base",
    driver: DriverOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this installation as a client sees it.

    `make bench` in the repository measures more, beside the raw tools.
    """
    with open_client() as client:
        found = {name: _summary(values) for name, values in _measure(client, template, driver, rounds).items()}
    if as_json:
        show.document(found)
    else:
        rows = [[name, *(f"{found[name][key]:.1f}" for key in ("p50_ms", "max_ms"))] for name in found]
        show.table(["WHAT", "P50 MS", "MAX MS"], rows)


def _measure(client: "Client", template: str, driver: str | None, rounds: int) -> dict[str, list[float]]:
    from space import Sandbox

    found: dict[str, list[float]] = {}
    options: dict[str, Any] = {"driver": driver} if driver else {}

    def timed(name: str, action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        found.setdefault(name, []).append((time.perf_counter() - began) * 1000)

    for _ in range(rounds):
        began = time.perf_counter()
        with Sandbox.create(template, client=client, **options) as sandbox:
            sandbox.run(["true"], check=True)
            found.setdefault("create to first output", []).append((time.perf_counter() - began) * 1000)
    with Sandbox.create(template, client=client, **options) as sandbox:
        for _ in range(rounds):
            timed("exec of true", lambda: sandbox.run(["true"], check=True))
        for _ in range(rounds):
            timed("pause", sandbox.pause)
            timed("resume", sandbox.resume)
        for _ in range(rounds):
            timed("suspend", sandbox.suspend)
            timed("wake to first output", lambda: (sandbox.wake(), sandbox.run(["true"], check=True)))
    return found


def _summary(values: list[float]) -> dict[str, float]:
    return {"p50_ms": statistics.median(values), "max_ms": max(values), "rounds": len(values)}
