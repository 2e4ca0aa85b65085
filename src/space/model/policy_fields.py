"""The fields of policies and grants, each with what it may hold, and what to do about anything else."""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

from space.model.addresses import as_address
from space.model.hosts import HOST_CHARS_MAX, normalise_host, normalise_pattern
from space.model.paths import GLOB_CHARS_MAX, normalise_glob

HOSTS_MAX = 256
PATHS_MAX = 64
PORTS_MAX = 64
METHODS_MAX = 32

_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
Entry = TypeVar("Entry")
Choice = TypeVar("Choice", bound=StrEnum)


class PolicyInvalid(ValueError):
    """A document is no policy, or no grant. ``field`` says where (``rules[2].hosts[0]``), the message what would do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def parse_hosts(given: Mapping[str, Any], at: str = "") -> tuple[str, ...]:
    """Read the field ``hosts``: 1 to 256 patterns. Raises ``PolicyInvalid``."""
    return parse_each(given, "hosts", at, HOSTS_MAX, _host, needed=True)


def parse_ports(given: Mapping[str, Any], at: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read the field ``ports``: numbers, in their order. Raises ``PolicyInvalid``."""
    return tuple(sorted(parse_each(given, "ports", at, PORTS_MAX, _port))) or default


def parse_methods(given: Mapping[str, Any], at: str = "") -> tuple[str, ...]:
    """Read the field ``methods``, in upper case; none: any method. Raises ``PolicyInvalid``."""
    return parse_each(given, "methods", at, METHODS_MAX, _method)


def parse_paths(given: Mapping[str, Any], at: str = "") -> tuple[str, ...]:
    """Read the field ``paths``: patterns as `model/paths.py` has them; none: any path. Raises ``PolicyInvalid``."""
    return parse_each(given, "paths", at, PATHS_MAX, _glob)


def parse_object(value: object, at: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PolicyInvalid(at, "It must be an object.")
    given = cast("Mapping[str, Any]", value)
    unknown = [str(key)[:40] for key in given if key not in known]
    if unknown:
        raise PolicyInvalid(at, f"There is no field {unknown[0]!r}; there are {', '.join(known)}.")
    return given


def parse_list(given: Mapping[str, Any], name: str, at: str, most: int) -> Sequence[object]:
    value: object = given.get(name, ())
    if not isinstance(value, list | tuple):
        raise PolicyInvalid(f"{at}{name}", "It must be a list.")
    entries = cast("Sequence[object]", value)
    if len(entries) > most:
        raise PolicyInvalid(f"{at}{name}", f"It may have {most} entries.")
    return entries


def parse_each(
    given: Mapping[str, Any],
    name: str,
    at: str,
    most: int,
    read: Callable[[object, str], Entry],
    *,
    needed: bool = False,
) -> tuple[Entry, ...]:
    """Read every entry of a list, each once."""
    entries = parse_list(given, name, at, most)
    if needed and not entries:
        raise PolicyInvalid(f"{at}{name}", "It must have at least one entry.")
    return tuple(dict.fromkeys(read(entry, f"{at}{name}[{number}]") for number, entry in enumerate(entries)))


def one_of(given: Mapping[str, Any], at: str, kind: type[Choice], default: Choice) -> Choice:
    """Read the field that ``at`` ends in."""
    value = given.get(at.rpartition(".")[2], default)
    if not isinstance(value, str) or value not in set(kind):
        raise PolicyInvalid(at, f"It must be one of {', '.join(kind)}.")
    return kind(value)


def parse_port_range(entry: object, at: str) -> tuple[int, int]:
    match = _PORTS.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        port = _port(int(entry) if isinstance(entry, str) and re.fullmatch("[0-9]{1,5}", entry) else entry, at)
        return port, port
    first, last = _port(int(match[1]), at), _port(int(match[2]), at)
    if first > last:
        raise PolicyInvalid(at, "The first port of a range must not be above its last.")
    return first, last


def parse_network(entry: object, at: str) -> str:
    if not isinstance(entry, str) or len(entry) > 64 or "%" in entry:
        raise PolicyInvalid(at, "It must be a text such as `10.1.2.0/24`.")
    try:
        network = ipaddress.ip_network(entry, strict=False)
        address = ipaddress.ip_address(entry.partition("/")[0])
    except ValueError:
        raise PolicyInvalid(at, f"{entry!r} is no network, such as `10.1.2.0/24`, and no address.") from None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        raise PolicyInvalid(at, f"{entry!r} is made of IPv4 addresses: write it as an IPv4 network.")
    if network.network_address != address:
        raise PolicyInvalid(at, f"{entry!r} is an address within a network: write {str(network)!r} for all of it.")
    return str(network)


def _host(entry: object, at: str) -> str:
    if not isinstance(entry, str):
        raise PolicyInvalid(at, "It must be a text: a host name, `*.suffix` or `*`.")
    pattern = normalise_pattern(entry)
    if pattern is not None:
        return pattern
    if len(entry) > HOST_CHARS_MAX + 3:
        raise PolicyInvalid(at, f"A host name has at most {HOST_CHARS_MAX} characters.")
    if as_address(entry.strip("[]")) is not None:
        raise PolicyInvalid(at, f"{entry!r} is an address. Rules under `networks` are for addresses.")
    if "/" in entry or ":" in entry:
        raise PolicyInvalid(
            at, f"{entry!r} is more than a host name: leave out scheme and path, and write ports as `ports`."
        )
    if not entry.isascii():
        raise PolicyInvalid(at, f"{entry!r} has letters that are not ASCII.{_ascii_form(entry)}")
    raise PolicyInvalid(at, f"{entry!r} is neither a host name, nor `*.suffix` (a `*` stands only there), nor `*`.")


def _ascii_form(entry: str) -> str:
    try:
        host = normalise_host(entry.removeprefix("*.").encode("idna").decode())
    except UnicodeError:
        return ""
    return f" Its form for the wire is {host!r}." if host else ""


def _port(entry: object, at: str) -> int:
    if not isinstance(entry, int) or isinstance(entry, bool) or not 0 < entry < 1 << 16:
        raise PolicyInvalid(at, "It must be a number from 1 to 65535.")
    return entry


def _method(entry: object, at: str) -> str:
    # Before upper(): there are letters that become ASCII ones there.
    if not isinstance(entry, str) or not entry.isascii() or not _METHOD.fullmatch(entry.upper()):
        raise PolicyInvalid(at, "It must be the name of a method, such as `GET`. Without `methods` a rule is for all.")
    return entry.upper()


def _glob(entry: object, at: str) -> str:
    glob = normalise_glob(entry) if isinstance(entry, str) else None
    if glob is None:
        raise PolicyInvalid(
            at,
            f"It must be a path of at most {GLOB_CHARS_MAX} characters that begins with `/`, without query, `//`, `;`, "
            "`.` and `..` segments or encoded slashes. `*` stands for anything within a segment; `**`, once, and a "
            "segment of its own, for any segments.",
        )
    return glob
