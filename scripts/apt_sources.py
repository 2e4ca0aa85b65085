"""Print a deb822 sources entry for suites of the archive that this machine's own system came from.

    apt_sources.py            the machine's own suites (release, -updates, -security)
    apt_sources.py trixie     that suite instead, from the same mirror and signed by the same keys

apt itself says what its sources are, in whichever format they are written; only `Signed-By` is read from the files.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SIGNED_BY_FIELD = r"^Signed-By:((?:.*)(?:\n[ \t].*)*)"
SIGNED_BY_OPTION = r"signed-by=([^\s\]]+)"
ORIGINS = {"Debian", "Ubuntu", ""}
COMPONENTS = {"main", "universe"}


class Source(NamedTuple):
    uri: str
    suite: str
    component: str
    origin: str
    file: str


def machine_sources() -> list[Source]:
    fields = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(SOURCESENTRY)"
    out = subprocess.run(
        ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [Source(*line.rsplit("|", 4)) for line in dict.fromkeys(out.splitlines())]


def os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def signed_by(source: Source) -> str | None:
    """Signed-By as written for that archive: a path, a fingerprint or a key block. None: apt's common keys."""
    text = Path(source.file.rpartition(":")[0]).read_text()
    for stanza in re.split(r"\n\s*\n", text):
        if names(source.uri, stanza) and (found := re.search(SIGNED_BY_FIELD, stanza, re.MULTILINE | re.IGNORECASE)):
            return found[1].strip()
    for line in text.splitlines():
        if (
            line.startswith("deb")
            and names(source.uri, line)
            and (found := re.search(SIGNED_BY_OPTION, line, re.IGNORECASE))
        ):
            return found[1]
    return None


def names(uri: str, text: str) -> bool:
    return uri.rstrip("/") in {word.rstrip("/") for word in text.split()}


def entry(source: Source, suite: str, components: list[str]) -> str:
    lines = ["Types: deb", f"URIs: {source.uri}", f"Suites: {suite}", f"Components: {' '.join(components)}"]
    if keys := signed_by(source):
        lines.append(f"Signed-By: {keys}")
    return "\n".join(lines) + "\n"


def main(suite: str | None) -> None:
    codename = os_release()["VERSION_CODENAME"]
    suites = [codename, f"{codename}-updates", f"{codename}-security"]
    own = [s for s in machine_sources() if s.suite in suites and s.origin in ORIGINS and s.component in COMPONENTS]
    main_archive = next((s for s in own if s.suite == codename), None)
    if main_archive is None:
        sys.exit(f"No apt source for {codename} is known here; run apt-get update, and check /etc/apt/sources.list.d.")
    if suite is not None:
        print(entry(main_archive, suite, ["main"]), end="")
        return
    archives = dict.fromkeys((s.uri, s.suite) for s in own)
    components = {key: sorted({s.component for s in own if (s.uri, s.suite) == key}) for key in archives}
    first = {(s.uri, s.suite): s for s in reversed(own)}
    print("\n".join(entry(first[key], key[1], components[key]) for key in archives), end="")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
