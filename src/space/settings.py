"""Every setting of one installation, read once at start and frozen.

Sources, strongest first: environment variables ``SPACE_<NAME>``, then the file named by ``SPACE_CONFIG`` (TOML, default
``/etc/space/space.toml``, may be absent). An unknown key in the file is an error.
"""

import ipaddress
import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from space.errors import HostError

CONFIG_FILE = Path("/etc/space/space.toml")


def _listed(value: Any) -> Any:
    """Read a list as the environment gives it: names with commas between them, or JSON."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("[") else [name for name in value.split(",") if name]


def _address(value: str) -> str:
    return str(ipaddress.ip_address(value))


Registry = Annotated[str, Field(pattern=r"^[0-9A-Za-z.-]{1,253}(:[0-9]{1,5})?$")]
IpAddress = Annotated[str, AfterValidator(_address)]
HostOrNetwork = Annotated[str, Field(pattern=r"^[0-9A-Za-z.:/-]{1,253}$")]
HostName = Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,253}$")]


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
    firecracker: Path | None = None
    """Directory with the programs `firecracker` and `jailer` of one release; unset means /opt/space/firecracker, else
    the one on PATH that has `firecracker`."""
    firecracker_cpu_template: Annotated[str, Field(pattern=r"^[A-Z0-9]{0,8}$")] = ""
    """A CPU template of Firecracker's own, as T2 or T2CL, that hides differences between hosts' processors from guests;
    empty means none."""
    kernel: Path = Path("/opt/space/kernel")
    """Directory with the kernel of virtual machines: `vmlinux` and `initrd`, as scripts/guest-kernel makes them."""

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
    domain: Annotated[str | None, Field(pattern=r"^[a-z0-9.-]{1,200}(:[0-9]{1,5})?$")] = None
    """Where sandboxes' ports have hosts of their own, `{port}-{sandbox}.{domain}`: a domain all of whose names lead to
    the data plane, perhaps with a port. Unset means sandboxes.localhost:<node_port>, which this machine's browsers and
    curl find here."""
    e2b_host: str = "127.0.0.1"
    """Address that E2B's clients are served on. Other than loopback needs TLS or `allow_plaintext`."""
    e2b_port: Annotated[int, Field(ge=0, le=65535)] = 8703
    """TCP port that E2B's clients are served on; 0 means that they are not."""
    e2b_domain: Annotated[str | None, Field(pattern=r"^[a-z0-9.-]{1,200}(:[0-9]{1,5})?$")] = None
    """The domain that E2B's clients are told, perhaps with a port: `api.{domain}` and `{port}-{sandbox}.{domain}` lead
    to `e2b_port`, with TLS. Unset means that clients are given URLs instead (`space env --e2b`)."""
    e2b_tls_certificate: Path | None = None
    """File with the certificate chain (PEM) for `api.{domain}` and `*.{domain}`; unset means that no TLS is spoken."""
    e2b_tls_key: Path | None = None
    """File with the certificate's private key (PEM), for the api's user to read; unset: it is with the certificate."""
    e2b_images: dict[str, str] = {"e2bdev/base": "base", "e2bdev/code-interpreter": "code-interpreter-v1"}
    """Templates that stand for images which E2B's clients build from: by the image's name, with its tag unless that is
    `latest`. All other images come from their registries."""
    allow_plaintext: bool = False
    """Allow listening on other than loopback without TLS."""
    store_url: str | None = None
    """SQLAlchemy URL; unset means SQLite in data_dir/api/store.db."""
    api_user: str = "space-api"
    """System user of the api process."""
    node_user: str = "space-node"
    """System user of the node process."""
    gateway_user: str = "space-gateway"
    """System user of the gateway process."""
    gateway_port: Annotated[int, Field(ge=1, le=65535)] = 8702
    """TCP port of the gateway, which only sandboxes can reach: whatever they connect to leads there."""
    gateway_dns_port: Annotated[int, Field(ge=1, le=65535)] = 8753
    """UDP and TCP port of the gateway that answers sandboxes' questions for names; only they can reach it."""

    driver: str | None = None
    """The driver for sandboxes that name none; unset means the strongest that works here."""
    disk_store_mib: Annotated[int, Field(ge=1024)] = 32 * 1024
    """Size of the copy-on-write store that holds templates and sandboxes' disks. It is set aside on the host's file
    system at once, as far as that leaves a tenth of that free, or 16 GiB where a tenth is more."""
    template_publish_s: Annotated[float, Field(gt=0)] = 900
    """Longest time that reading through a new template's files may take."""
    sandboxes_max: Annotated[int, Field(ge=1)] = 200
    """Most sandboxes with a machine or a disk at one time."""
    memory_reserve_mib: Annotated[int, Field(ge=0)] = 512
    """How much of the host's memory stays free: no sandbox is started that would leave less."""
    cpus_max: Annotated[float, Field(gt=0)] = 16
    """Most cpus a sandbox may ask for."""
    memory_mib_max: Annotated[int, Field(ge=64)] = 16 * 1024
    """Most memory a sandbox may ask for."""
    disk_mib_max: Annotated[int, Field(ge=64)] = 64 * 1024
    """Most disk a sandbox may ask for."""
    pids_max: Annotated[int, Field(ge=16)] = 32768
    """Most processes and threads a sandbox may ask for."""
    project_sandboxes_max: Annotated[int | None, Field(ge=0)] = None
    """Most sandboxes that a new project may have, until its quota is changed; unset means no limit."""
    project_cpus_max: Annotated[float | None, Field(ge=0)] = None
    """Most cpus that a new project's sandboxes may have together; unset means no limit."""
    project_memory_mib_max: Annotated[int | None, Field(ge=0)] = None
    """Most memory that a new project's sandboxes may have together; unset means no limit."""
    project_disk_mib_max: Annotated[int | None, Field(ge=0)] = None
    """Most disk that a new project's sandboxes and snapshots may have together; unset means no limit."""
    pool_min: Annotated[int, Field(ge=0)] = 1
    """Fewest machines kept waiting for each kind of sandbox that is asked for."""
    pool_max: Annotated[int, Field(ge=0)] = 16
    """Most machines kept waiting for one kind of sandbox; 0 turns waiting machines off."""
    pool_memory_mib: Annotated[int, Field(ge=0)] = 1024
    """Memory that all waiting machines together may take of the host; one that idles takes 25 to 40 MiB."""
    trusted_template_registries: Annotated[tuple[Registry, ...] | None, BeforeValidator(_listed), NoDecode] = None
    """Image registries that templates may be built from, each exactly as `host` or `host:port`; unset means any. In the
    environment with commas between them, or a JSON list."""
    project_builds_max: Annotated[int, Field(ge=0)] = 4
    """Most builds of templates that one project may have under way."""
    upload_mib_max: Annotated[int, Field(ge=1)] = 8 * 1024
    """Largest context, image archive or root file system that may be uploaded for a build."""
    project_uploads_mib_max: Annotated[int, Field(ge=1)] = 16 * 1024
    """Most that the uploads of one project may take together until they are deleted or a day old."""
    builds_max: Annotated[int, Field(ge=1)] = 2
    """Most builds of templates that are carried out at one time; others wait."""
    build_log_mib: Annotated[int, Field(ge=1, le=1024)] = 4
    """How much of the log of one build is kept."""
    build_image_mib_max: Annotated[int, Field(ge=1)] = 16 * 1024
    """Largest image, as its registry sends it, that a build may begin with."""
    build_cache_mib: Annotated[int, Field(ge=0)] = 16 * 1024
    """How much steps and layers kept for later builds may take; those used longest ago go first."""
    body_mib_max: Annotated[int, Field(ge=1)] = 4
    """Largest JSON request body. File uploads are streamed and bounded by the sandbox's disk."""
    replay_s: Annotated[float, Field(ge=0)] = 3600
    """How long a command's output can be replayed after it ended."""
    log_level: str = "info"
    """debug, info, warning or error."""
    otlp_endpoint: Annotated[str | None, Field(pattern=r"^https?://[^\s@?#]+$", max_length=2000)] = None
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; unset means that
    no traces are exported."""
    webhook_private_hosts: tuple[HostOrNetwork, ...] = ()
    """Host names and networks (CIDR) that webhooks may reach although they are not public; there plain HTTP will do,
    too. In the environment a JSON list."""
    egress_default_policy: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "none"
    """What may leave a sandbox when neither it, its template nor its project says so: a preset, `none`,
    `package-registries` or `public-internet`."""
    egress_private_hosts: Annotated[tuple[HostOrNetwork, ...], BeforeValidator(_listed), NoDecode] = ()
    """Host names and networks (CIDR) that the gateway may connect to although they are not public, where a sandbox's
    policy allows them. In the environment with commas between them, or a JSON list."""
    egress_resolvers: Annotated[tuple[IpAddress, ...] | None, BeforeValidator(_listed), NoDecode] = None
    """Addresses of the name servers that the gateway asks; unset means those of the host's /etc/resolv.conf. In the
    environment with commas between them, or a JSON list."""
    egress_ca_file: Path | None = None
    """File with certificates (PEM) that the gateway trusts in servers beside the host's own store."""
    package_registries: Annotated[tuple[HostName, ...] | None, BeforeValidator(_listed), NoDecode] = None
    """Hosts that the preset `package-registries` allows; unset means those in <data_dir>/registries, which scripts/up
    finds by asking this host's own package managers. In the environment with commas between them, or a JSON list."""

    secrets_key_command: str | None = None
    """Program, with its arguments, that writes the keys which secrets are sealed with, a line `<id>:<32 bytes in
    base64>` each, the one that seals first; unset means <data_dir>/api/secrets.key, made when it is needed."""

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
    def gateway_dir(self) -> Path:
        """The authority that sandboxes trust: ``ca.key``, readable by ``gateway_user`` alone, and ``ca.crt``."""
        return self.data_dir / "gateway"

    @property
    def audit_dir(self) -> Path:
        """What the gateway writes down of what left sandboxes. Readable by ``gateway_user`` alone."""
        return self.gateway_dir / "audit"

    @property
    def registries_file(self) -> Path:
        """Hosts of package registries that set-up has found, one a line; may be absent."""
        return self.data_dir / "registries"

    @property
    def node_socket(self) -> Path:
        """Where the node serves the api."""
        return self.run_dir / "node" / "node.sock"

    @property
    def broker_socket(self) -> Path:
        """Where the broker serves the node."""
        return self.run_dir / "broker" / "broker.sock"

    @property
    def gateway_socket(self) -> Path:
        """Where the gateway serves the api."""
        return self.run_dir / "gateway" / "gateway.sock"

    @property
    def links_dir(self) -> Path:
        """A symbolic link ``<guest's address>`` → ``<machine id>,<host_v4>,<host_v6>`` for each address of a guest."""
        return self.run_dir / "links"

    @property
    def channels_dir(self) -> Path:
        """One directory per machine with the guest channel's two FIFOs, ``in`` and ``out``, which the node may open."""
        return self.run_dir / "channels"

    @property
    def data_plane_url(self) -> str:
        return self.node_url or f"http://{self.node_host}:{self.node_port}"

    @property
    def preview_domain(self) -> str:
        """Behind ``{port}-{sandbox}.`` the host of a port, with the TCP port where that is not the usual one."""
        return self.domain or f"sandboxes.localhost:{self.node_port}"

    @property
    def preview_scheme(self) -> str:
        """As the rest of the data plane is reached."""
        return "https" if self.data_plane_url.startswith("https:") else "http"

    def preview_url(self, sandbox_id: str, port: int) -> str:
        return f"{self.preview_scheme}://{port}-{sandbox_id}.{self.preview_domain}/"

    @property
    def e2b_url(self) -> str | None:
        """How E2B's clients on this host, or in the domain's network, reach what serves them; None: nothing does."""
        if self.e2b_port == 0:
            return None
        if self.e2b_domain is not None:
            return f"https://api.{self.e2b_domain}"
        host = "127.0.0.1" if self.e2b_host in {"0.0.0.0", "::"} else self.e2b_host  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.e2b_tls_certificate is None else 'https'}://{host}:{self.e2b_port}"

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
