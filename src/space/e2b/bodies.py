"""What requests to E2B's control plane look like. Fields that are not known are left alone, as E2B does."""

# ruff: noqa: N815 - pydantic copies defaults; the names are E2B's

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from space.e2b.call import Call
from space.errors import InvalidRequest
from space.model.volume import MOUNTS_MAX

TIMEOUT_S_MAX = 365 * 24 * 3600
TIMEOUT_S = 300
PAIRS_MAX = 64
KEY_MAX = 128
VALUE_BYTES_MAX = 1024
ENV_VARIABLES_MAX = 2048
ENV_BYTES_MAX = 128 * 1024
FORKS_MAX = 20
LIST_MAX = 1000


def without_nul(text: str) -> str:
    """Return it, or raise where it has a NUL."""
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


def _short(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > VALUE_BYTES_MAX:
        raise ValueError(f"may have at most {VALUE_BYTES_MAX} bytes")
    return without_nul(text)


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("is not the name of an environment variable")
    return name


def _few(most: int) -> Any:
    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > most:
            raise ValueError(f"may have at most {most} members")
        return value

    return BeforeValidator(check)


def _bounded(env: dict[str, str]) -> dict[str, str]:
    if sum(len(name.encode()) + len(value.encode()) + 2 for name, value in env.items()) > ENV_BYTES_MAX:
        raise ValueError(f"may have at most {ENV_BYTES_MAX} bytes in all")
    return env


Seconds = Annotated[int, Field(ge=0, le=TIMEOUT_S_MAX)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=KEY_MAX), AfterValidator(without_nul)]
Metadata = Annotated[dict[Key, Annotated[str, AfterValidator(_short)]], _few(PAIRS_MAX)]
Env = Annotated[
    dict[Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(without_nul)]],
    AfterValidator(_bounded),
    _few(ENV_VARIABLES_MAX),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(without_nul)]
Listed = Annotated[list[Annotated[str, StringConstraints(max_length=255)]], _few(LIST_MAX)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class AutoResume(Body):
    enabled: bool = False


class Transform(Body):
    """What is changed of a request. Values of headers are secrets, which are in no error."""

    headers: Annotated[dict[Key, str], _few(PAIRS_MAX)] = Field({}, repr=False)


class Rule(Body):
    transform: Transform | None = None


class Network(Body):
    """What may leave the sandbox, and who may ask its ports."""

    allowPublicTraffic: bool = True
    allowOut: Listed | None = None
    denyOut: Listed | None = None
    rules: Annotated[dict[Name, Annotated[list[Rule], _few(PAIRS_MAX)]], _few(LIST_MAX)] | None = None
    egressProxy: dict[str, Any] | None = None
    maskRequestHost: Annotated[str, StringConstraints(max_length=255)] | None = None
    httpsPorts: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], _few(64)] | None = None
    dnsServers: Listed | None = None


class NetworkUpdate(Network):
    """What may leave the sandbox from now on; what is not named is as it is by default."""

    allow_internet_access: bool | None = None


class VolumeMount(Body):
    name: Name
    path: Name


class NewSandbox(Body):
    templateID: Name
    timeout: Seconds = TIMEOUT_S
    autoPause: bool = False
    autoPauseMemory: bool | None = None
    autoResume: AutoResume = AutoResume()
    secure: bool = True
    allow_internet_access: bool | None = None
    network: Network | None = None
    metadata: Metadata = {}
    envVars: Env = {}
    volumeMounts: Annotated[list[VolumeMount], _few(MOUNTS_MAX)] | None = None
    iam: dict[str, Any] | None = None


MODE_MAX = 0o7777


class NewVolume(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class VolumeEntryChange(Body):
    uid: Annotated[int, Field(ge=0, le=2**32 - 2)] | None = None
    gid: Annotated[int, Field(ge=0, le=2**32 - 2)] | None = None
    mode: Annotated[int, Field(ge=0, le=MODE_MAX)] | None = None


class Timeout(Body):
    timeout: Seconds


class Refresh(Body):
    duration: Annotated[int, Field(ge=0, le=3600)] = 15


class Connect(Body):
    timeout: Seconds | None = None
    memory: bool | None = None


class Resume(Body):
    timeout: Seconds = 15
    autoPause: bool | None = None
    memory: bool | None = None


class Pause(Body):
    memory: bool | None = None
    requireHealthyGuest: bool | None = None


class Fork(Body):
    timeout: Seconds = 15
    count: Annotated[int, Field(ge=1, le=FORKS_MAX)] = 1


class NewSnapshot(Body):
    name: Name | None = None
    memory: bool | None = None


class SecretValue(Body):
    """A value, which is in no answer and no error."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    value: Annotated[str, StringConstraints(min_length=1, max_length=64 * 1024)] = Field(repr=False)
    metadata: Metadata | None = None


class NewSecret(SecretValue):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


B = TypeVar("B", bound=Body)


async def read(call: Call, form: type[B]) -> B:
    """Return the request's body in that form, or raise ``InvalidRequest`` that names what is wrong."""
    try:
        return form.model_validate(await call.json())
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"] if part != "[key]")[:200]
        raise InvalidRequest(f"{field}: {problem['msg']}".encode("utf-8", "replace").decode(), field=field) from None
