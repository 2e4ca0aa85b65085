"""An installation whose gateway knows the servers outside, and those servers with mirrors of package registries."""

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

from tests import installation
from tests.installation import Installation
from tests.mirrors import make_mirrors
from tests.upstreams import NAME_SERVER, NETWORKS, Outside, outside


@contextlib.contextmanager
def mirrors(directory: Path) -> Iterator[Outside]:
    make_mirrors(directory)
    with outside(directory) as found:
        yield found


@contextlib.contextmanager
def reaching(servers: Outside, **changes: object) -> Iterator[Installation]:
    ca = Path("/var/lib") / f"space-test-ca-{secrets.token_hex(3)}.pem"
    ca.write_text(servers.certificates.ca_pem)
    try:
        with installation.running(
            egress_resolvers=json.dumps([NAME_SERVER]),
            egress_private_hosts=json.dumps(NETWORKS),
            egress_ca_file=str(ca),
            **changes,
        ) as one:
            yield one
    finally:
        ca.unlink()
