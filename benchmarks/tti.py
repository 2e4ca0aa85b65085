"""``python tti.py COUNT``: from ``create()`` to the return of ``node -v`` (Debian's, in the template `base`) with E2B's
client: one after the other, one each 200 ms, and all at once. Prints JSON: for each way the milliseconds of those that
succeeded, and what the others met.

It runs in an environment that has E2B's client, which is unmodified and finds the installation by its variables.
"""

import json
import sys
import threading
import time

from e2b import Sandbox

STAGGER_S = 0.2
LIFE_S = 120


def once(values, errors):
    """Take one sandbox to its first result. What it took ends before the sandbox does."""
    began = time.perf_counter()
    sandbox = None
    try:
        sandbox = Sandbox.create(timeout=LIFE_S)
        shown = sandbox.commands.run("node -v").stdout
        took = (time.perf_counter() - began) * 1000
        if shown.startswith("v"):
            values.append(took)
        else:
            errors.append(f"node -v says {shown!r}")
    except Exception as error:  # noqa: BLE001 - whatever it is, this one did not succeed
        errors.append(f"{type(error).__name__}: {error}")
    finally:
        if sandbox is not None:
            sandbox.kill()


def sequential(count, values, errors):
    for _ in range(count):
        once(values, errors)


def at_once(count, values, errors, apart_s=0.0):
    threads = [threading.Thread(target=once, args=(values, errors)) for _ in range(count)]
    for thread in threads:
        thread.start()
        time.sleep(apart_s)
    for thread in threads:
        thread.join()


def staggered(count, values, errors):
    at_once(count, values, errors, STAGGER_S)


def main():
    found = {}
    for way in (sequential, staggered, at_once):
        values, errors = [], []
        way(int(sys.argv[1]), values, errors)
        found[way.__name__] = {"ms": values, "errors": errors}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
