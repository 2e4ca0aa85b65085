"""Rounds of chaos: ask for a lifecycle change, SIGKILL something at some moment of it, and look at what is left.

    python -m tests.chaos.rounds --rounds 300 --seed 7

A seed decides what is asked, who is killed and when, so that a run can be made again. After every round:

* the operation that was accepted has ended, and if SPACE's own process was killed it has succeeded: nothing that was
  accepted is lost, and asking again with the same key has made nothing twice;
* what was written before is there, unless the machine itself was killed and the sandbox says that it failed;
* the sandbox can be brought back or deleted, and within 5 s of its deletion nothing of it is on the host.
"""

import argparse
import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.client import WAIT, Api
from tests.installation import Installation, running

OPERATIONS = ("create", "pause", "resume", "suspend", "wake", "stop", "start", "snapshot", "branch", "fork", "delete")
VICTIMS = ("api", "node", "broker", "sentry", "agent")
# How long each takes when nobody is killed; the moment of the kill is drawn from this and half as much again.
TYPICAL_S = {"create": 0.3, "wake": 0.3, "start": 0.5, "fork": 0.8, "branch": 0.4, "snapshot": 0.15, "suspend": 0.15}
TYPICAL_DEFAULT_S = 0.05
FIRST_STATE = {"resume": "pause", "wake": "suspend", "start": "stop"}
ENDS_IN = {"pause": "paused", "suspend": "suspended", "stop": "stopped", "delete": "deleted"}
STUCK_S = 90.0
LEFT_S = 5.0
NOTICED_S = 15.0
KEPT = "/home/user/kept"
OWN = {"api", "node", "broker"}


class RoundFailedError(AssertionError):
    """What a round claims did not hold."""


@dataclass
class Tally:
    """What happened in all rounds."""

    rounds: int = 0
    asked: Counter[str] = field(default_factory=Counter[str])
    killed: Counter[str] = field(default_factory=Counter[str])
    ended: Counter[str] = field(default_factory=Counter[str])
    sandboxes: Counter[str] = field(default_factory=Counter[str])
    """How the sandboxes were found after their operation and the kill."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def line(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))

        lines = [f"{self.rounds} rounds; asked: {line(self.asked)}", f"killed: {line(self.killed)}"]
        lines += [
            f"operations: {line(self.ended)}",
            f"sandboxes: {line(self.sandboxes)}",
            f"problems: {len(self.problems)}",
            *self.problems,
        ]
        return "\n".join(lines)


class Chaos:
    """Rounds on one installation; `run` returns the tally, `Tally.problems` is empty when all held."""

    def __init__(self, installation: Installation, seed: int) -> None:
        self.installation = installation
        self.random = random.Random(seed)
        self.seed = seed
        self.tally = Tally()

    def run(self, rounds: int, say: Callable[[str], None] = lambda _: None) -> Tally:
        plan = [(o, v) for o in OPERATIONS for v in VICTIMS]
        for number in range(rounds):
            if number % len(plan) == 0:
                self.random.shuffle(plan)  # everyone meets everything, in another order each time
            operation, victim = plan[number % len(plan)]
            at_s = self.random.uniform(0, 1.5 * TYPICAL_S.get(operation, TYPICAL_DEFAULT_S))
            self._hit = False
            name = f"round {number} (seed {self.seed}): {operation}, {victim} killed after {at_s * 1000:.0f} ms"
            began = time.monotonic()
            try:
                ended = self._round(operation, victim, at_s)
            except (AssertionError, httpx.HTTPError, OSError) as error:
                self.tally.problems.append(f"{name}: {type(error).__name__}: {error}")
                ended = "problem"
                self._clear()
            self.tally.rounds += 1
            self.tally.asked[operation] += 1
            self.tally.killed[victim if self._hit else f"{victim} (not there)"] += 1
            self.tally.ended[ended] += 1
            say(f"{name}: {ended} ({time.monotonic() - began:.1f} s)")
        self._clear()
        strays = self.installation.strays()
        self.tally.problems += [f"stray: {stray}" for stray in strays]
        return self.tally

    def _round(self, operation: str, victim: str, at_s: float) -> str:
        with Api(self.installation.url, self.installation.key) as api, contextlib.ExitStack() as made:
            source = self._prepare(api, operation, made)
            key = secrets.token_hex(8)
            with ThreadPoolExecutor(1) as thread:
                asking = thread.submit(self._ask, operation, source, key)
                self._kill(victim, source, at_s, asking)
                answer = asking.result()
            self.installation.wait_ready()
            finished = self._ended(api, answer)
            ids = [source] if source else []
            ids += [one for one in _sandboxes(answer) if one not in ids]
            outcome = self._judge(api, operation, victim, finished, ids)
            self._delete_all(api, ids, _snapshots(answer) + self._snapshots(api))
            return outcome

    def _prepare(self, api: Api, operation: str, made: contextlib.ExitStack) -> str | None:
        if operation == "create":
            return None
        sandbox = api.create()
        made.callback(self._forget, sandbox)
        api.write(sandbox, KEPT, sandbox.encode())
        if operation == "branch":
            body = {"kind": self.random.choice(["full", "disk"])}
            answer = api.call("POST", f"/v1/sandboxes/{sandbox}/snapshots", json=body, headers={"Prefer": "wait=60"})
            api.finished(answer.json())
        if operation in {"fork", "snapshot"} and (first := self.random.choice([None, "pause", "suspend"])):
            api.verb(sandbox, first)
        if first := FIRST_STATE.get(operation):
            api.verb(sandbox, first)
        return sandbox

    def _ask(self, operation: str, source: str | None, key: str) -> dict[str, Any]:
        """Ask until there is an answer, always with the same key: what was accepted once must not be done twice."""
        deadline = time.monotonic() + STUCK_S
        with Api(self.installation.url, self.installation.key) as api:
            while True:
                method, path, body = self._request(api, operation, source)
                try:
                    answer = api.http.request(method, path, json=body, headers={"Idempotency-Key": key})
                except httpx.TransportError:
                    answer = None
                if answer is not None and answer.is_success:
                    return answer.json()
                if answer is not None and _over_already(operation, answer):
                    return {"sandbox": {"id": source}, "operation": None}
                if time.monotonic() > deadline:
                    raise RoundFailedError(f"never accepted: {answer.text if answer is not None else 'no answer'}")
                time.sleep(0.05)

    def _request(self, api: Api, operation: str, source: str | None) -> tuple[str, str, dict[str, Any] | None]:
        if operation == "create":
            return "POST", "/v1/sandboxes", {"template": "base"}
        if operation == "branch":
            with contextlib.suppress(httpx.TransportError, AssertionError, IndexError):
                self._branched = self._snapshots(api)[0]
            return "POST", "/v1/sandboxes", {"template": f"snapshot:{self._branched}"}
        path = f"/v1/sandboxes/{source}"
        if operation == "fork":
            return "POST", f"{path}/fork", {"count": 2}
        if operation == "snapshot":
            return "POST", f"{path}/snapshots", {"kind": "full"}
        return ("DELETE", path, None) if operation == "delete" else ("POST", f"{path}/{operation}", None)

    def _kill(self, victim: str, source: str | None, at_s: float, asking: Future[dict[str, Any]]) -> None:
        time.sleep(at_s)
        if victim in OWN:
            self.installation.kill(victim)
            self._hit = True
            return
        sandbox = source or self._newest(asking)
        body = self.installation.names_of(sandbox)[-1] if sandbox else ""
        if victim == "agent":
            self._hit = self.installation.kill_agent(body)
            return
        pids = self.installation.processes_of(body) if body else []
        self._hit = bool(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _newest(self, asking: Future[dict[str, Any]]) -> str | None:
        with contextlib.suppress(Exception):
            return str(asking.result(timeout=2)["sandbox"]["id"])
        return None

    def _ended(self, api: Api, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Return the operation once it has ended; a tombstone may have taken it along."""
        operation = answer["operation"]
        if operation is None:
            return None
        deadline = time.monotonic() + STUCK_S
        while operation["state"] in {"pending", "running"}:
            if time.monotonic() > deadline:
                raise RoundFailedError(f"stuck: {operation}")
            operation = api.call("GET", f"/v1/operations/{operation['id']}", params={"wait_s": 5}).json()
        return operation

    def _judge(self, api: Api, operation: str, victim: str, finished: dict[str, Any] | None, ids: list[str]) -> str:
        state = "joined" if finished is None else str(finished["state"])
        if victim in OWN and state == "failed":
            raise RoundFailedError(f"accepted and lost: {finished}")
        for sandbox in ids:
            self._look(api, sandbox, operation, victim)
        return state

    def _look(self, api: Api, sandbox: str, operation: str, victim: str) -> None:
        found = self._at_rest(api, sandbox)
        self.tally.sandboxes[_described(found)] += 1
        if found is None:
            if operation != "delete":
                raise RoundFailedError(f"{sandbox} is gone though nobody deleted it")
            return
        if found["state"] != "failed":
            try:
                self._use(api, sandbox, written=operation != "create")
            except (AssertionError, httpx.HTTPError):
                if victim in OWN:
                    raise
                found = self._failed(api, sandbox)  # its machine was killed, which is only now being noticed
            else:
                return
        if victim in OWN:
            raise RoundFailedError(f"failed: {found['failure']}")
        if not found["failure"] or found["failure"]["code"] in {"", "internal"}:
            raise RoundFailedError(f"failed without saying why: {found['failure']}")
        self._revive(api, sandbox)

    def _use(self, api: Api, sandbox: str, *, written: bool) -> None:
        if api.get(sandbox)["state"] != "running":
            api.verb(sandbox, "wake")
        shown = api.exec(sandbox, f"cat {KEPT} 2>/dev/null || true", timeout_s=20)["stdout"]
        if written and not shown.startswith("sbx"):
            raise RoundFailedError(f"{sandbox} has lost what was written: {shown!r}")

    def _failed(self, api: Api, sandbox: str) -> dict[str, Any]:
        deadline = time.monotonic() + NOTICED_S
        while (found := api.get(sandbox))["state"] != "failed":
            if time.monotonic() > deadline:
                raise RoundFailedError(f"its machine is dead, and it says {found['state']}")
            time.sleep(0.05)
        return found

    def _revive(self, api: Api, sandbox: str) -> None:
        """A failed sandbox boots again on its disk, or says in so many words that it has none."""
        answer = api.http.post(f"/v1/sandboxes/{sandbox}/start", headers=WAIT)
        if answer.is_success:
            done = api.exec(sandbox, "echo alive", timeout_s=20)
            if done["stdout"] != "alive\n":
                raise RoundFailedError(f"started again, it does not answer: {done}")
        elif (code := answer.json()["error"]["code"]) not in {"disk-lost", "sandbox-not-found"}:
            raise RoundFailedError(f"does not start again: {code}: {answer.text}")
        self.tally.sandboxes["started again" if answer.is_success else "not started again (disk-lost)"] += 1

    def _at_rest(self, api: Api, sandbox: str) -> dict[str, Any] | None:
        """Return the sandbox once it rests, and long enough for a killed machine to be noticed."""
        deadline = time.monotonic() + STUCK_S
        while True:
            answer = api.http.get(f"/v1/sandboxes/{sandbox}")
            if answer.status_code == httpx.codes.NOT_FOUND:
                return None
            found = answer.json()
            if found["state"] in {"paused", "suspended", "stopped", "failed"}:
                return found
            if found["state"] == "running":
                probe = api.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["/bin/true"], "timeout_s": 20})
                if probe.is_success and probe.json()["exit"]["kind"] == "exited":
                    return found
            if time.monotonic() > deadline:
                raise RoundFailedError(f"does not come to rest: {found}")
            time.sleep(0.05)

    def _delete_all(self, api: Api, ids: list[str], snapshots: list[str]) -> None:
        for one in ids:
            self.installation.names_of(one)  # while it can be found out
        for one in ids:
            if api.http.get(f"/v1/sandboxes/{one}").status_code != httpx.codes.NOT_FOUND:
                api.delete(one)
        for one in snapshots:
            api.http.delete(f"/v1/snapshots/{one}")
        deadline = time.monotonic() + LEFT_S
        while left := [item for one in ids for item in self.installation.leftovers_of(one)]:
            if time.monotonic() > deadline:
                raise RoundFailedError(f"left on the host: {left}")
            time.sleep(0.1)

    def _snapshots(self, api: Api) -> list[str]:
        listed = api.call("GET", "/v1/snapshots").json()["items"]
        return [one["id"] for one in listed if one["state"] != "deleted"]

    def _forget(self, sandbox: str) -> None:
        with contextlib.suppress(httpx.HTTPError), Api(self.installation.url, self.installation.key) as api:
            api.http.delete(f"/v1/sandboxes/{sandbox}", headers={"Prefer": "wait=30"})

    def _clear(self) -> None:
        """Whatever a round that failed has left must not trouble the next."""
        with contextlib.suppress(httpx.HTTPError, AssertionError):
            self.installation.wait_ready()
            self.installation.delete_all()

    _branched = ""
    _hit = False


def _over_already(operation: str, answer: httpx.Response) -> bool:
    """Whether a repeated request, which has no key of its own, says that the first one has done it already."""
    if operation == "delete":
        return answer.status_code == httpx.codes.NOT_FOUND
    if answer.status_code != httpx.codes.CONFLICT:
        return False
    error = answer.json()["error"]
    return error["code"] == "wrong-state" and error["details"].get("state") in {
        ENDS_IN.get(operation, "running"),
        "failed",
    }


def _described(found: dict[str, Any] | None) -> str:
    if found is None:
        return "deleted"
    return f"failed ({found['failure']['code']})" if found["failure"] else str(found["state"])


def _sandboxes(answer: dict[str, Any]) -> list[str]:
    found = [one["id"] for one in answer.get("sandboxes", [])]
    return found + ([answer["sandbox"]["id"]] if "sandbox" in answer else [])


def _snapshots(answer: dict[str, Any]) -> list[str]:
    return [answer["snapshot"]["id"]] if "snapshot" in answer else []


@contextlib.contextmanager
def _installation() -> Iterator[Installation]:
    with running(log_level="warning") as one:
        yield one


def main() -> int:
    """Run rounds on an installation of their own; print the seed and the tally; 1 when anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.rounds", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    with _installation() as installation:
        tally = Chaos(installation, options.seed).run(options.rounds, say=lambda line: print(line, flush=True))
    print(f"seed {options.seed}\n{tally}")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
