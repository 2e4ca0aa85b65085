"""Every setting of one installation, read once at start and frozen.

Sources, strongest first: environment variables ``SPACE_<NAME>``, then the file named by ``SPACE_CONFIG`` (TOML, default
``/etc/space/space.toml``, may be absent). An unknown key in the file is an error.
"""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from space.errors import HostError

CONFIG_FILE = Path("/etc/space/space.toml")


class Settings(BaseSettings):
    """One installation. Several of them on one host differ in ``instance``, directories and ports."""

    model_config = SettingsConfigDict(env_prefix="SPACE_", frozen=True, extra="forbid")

    instance: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,7}$")] = "space"
    """Names the installation's cgroup, nftables table, namespaces and links."""
    data_dir: Path = Path("/var/lib/space")
    """Everything that must outlive a restart: store, disks, kept output."""
    run_dir: Path = Path("/run/space")
    """Sockets, guest channels and logs."""
    guest_dir: Path = Path("/opt/space/guest")
    """The guest runtime that every sandbox sees read-only at /.space."""
    runsc: Path | None = None
    """The runsc binary; unset means /opt/space/bin/runsc, else the one on PATH."""

    api_host: str = "127.0.0.1"
    """Address the api listens on. Other than loopback needs TLS in front, or `allow_plaintext`."""
    api_port: Annotated[int, Field(ge=1, le=65535)] = 8700
    """TCP port of the api."""
    node_host: str = "127.0.0.1"
    """Address the node's data plane listens on."""
    node_port: Annotated[int, Field(ge=1, le=65535)] = 8701
    """TCP port of the node's data plane."""
    node_url: str | None = None
    """How clients reach the node's data plane; unset means http://<node_host>:<node_port>."""
    allow_plaintext: bool = False
    """Allow listening on other than loopback without TLS."""
    store_url: str | None = None
    """SQLAlchemy URL; unset means SQLite in data_dir/api/store.db."""
    api_user: str = "space-api"
    """System user of the api process."""
    node_user: str = "space-node"
    """System user of the node process."""

    driver: str | None = None
    """The driver for sandboxes that name none; unset means the strongest that works here."""
    disk_store_mib: Annotated[int, Field(ge=1024)] = 32 * 1024
    """Size of the copy-on-write store that holds templates and sandboxes' disks. It is set aside on the host's file
    system at once, as far as that keeps a tenth of itself free."""
    sandboxes_max: Annotated[int, Field(ge=1)] = 200
    """Most sandboxes with a machine or a disk at one time."""
    cpus_max: Annotated[float, Field(gt=0)] = 16
    """Most cpus a sandbox may ask for."""
    memory_mib_max: Annotated[int, Field(ge=64)] = 16 * 1024
    """Most memory a sandbox may ask for."""
    disk_mib_max: Annotated[int, Field(ge=64)] = 64 * 1024
    """Most disk a sandbox may ask for."""
    pids_max: Annotated[int, Field(ge=16)] = 32768
    """Most processes and threads a sandbox may ask for."""
    body_mib_max: Annotated[int, Field(ge=1)] = 4
    """Largest JSON request body. File uploads are streamed and bounded by the sandbox's disk."""
    replay_s: Annotated[float, Field(ge=0)] = 3600
    """How long a command's output can be replayed after it ended."""
    log_level: str = "info"
    """debug, info, warning or error."""

    @property
    def api_dir(self) -> Path:
        """The api's own files: store, signing key. Readable by ``api_user`` alone."""
        return self.data_dir / "api"

    @property
    def node_dir(self) -> Path:
        """The node's own files: output of commands. Readable by ``node_user`` alone."""
        return self.data_dir / "node"

    @property
    def broker_dir(self) -> Path:
        """The broker's own files: disks, templates, snapshots, journals. Readable by root alone."""
        return self.data_dir / "broker"

    @property
    def node_socket(self) -> Path:
        """Where the node serves the api."""
        return self.run_dir / "node" / "node.sock"

    @property
    def broker_socket(self) -> Path:
        """Where the broker serves the node."""
        return self.run_dir / "broker" / "broker.sock"

    @property
    def channels_dir(self) -> Path:
        """One directory per machine with the guest channel's two FIFOs, ``in`` and ``out``, which the node may open."""
        return self.run_dir / "channels"

    @property
    def data_plane_url(self) -> str:
        return self.node_url or f"http://{self.node_host}:{self.node_port}"

    @property
    def store(self) -> str:
        return self.store_url or f"sqlite:///{self.api_dir / 'store.db'}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = Path(os.environ.get("SPACE_CONFIG", str(CONFIG_FILE)))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


def load(**overrides: Any) -> Settings:
    """Read the settings, or raise ``HostError`` naming each key that is wrong and why."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise HostError(f"The settings are not valid: {wrong}", code="invalid-settings") from error
