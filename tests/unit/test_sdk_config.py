"""Where the SDK finds its address and key."""

import json
import os
from pathlib import Path

import pytest

from space import InvalidRequest, NotFound, Unauthenticated
from space.sdk.config import DEFAULT_URL, Credentials, credentials_file, e2b_environment, find_credentials


def write(home: Path, content: str, mode: int = 0o600) -> dict[str, str]:
    environ = {"HOME": str(home)}
    path = credentials_file(environ)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    path.chmod(mode)
    return environ


STORED = json.dumps({"url": "http://127.0.0.1:9000", "api_key": "sk_stored"})


def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    environ = write(tmp_path, STORED)
    assert find_credentials(environ=environ) == Credentials("http://127.0.0.1:9000", "sk_stored")
    environ |= {"SPACE_URL": "http://env:1/", "SPACE_API_KEY": "sk_env"}
    assert find_credentials(environ=environ) == Credentials("http://env:1", "sk_env")
    assert find_credentials("https://arg", "sk_arg", environ) == Credentials("https://arg", "sk_arg")


def test_a_key_alone_means_this_machine() -> None:
    assert find_credentials(environ={"SPACE_API_KEY": "sk_env"}).url == DEFAULT_URL


def test_a_stored_key_is_never_sent_to_another_address(tmp_path: Path) -> None:
    environ = write(tmp_path, STORED)
    with pytest.raises(Unauthenticated) as caught:
        find_credentials("http://elsewhere:1", environ=environ)
    assert "http://elsewhere:1" in caught.value.message
    assert "sk_stored" not in str(caught.value)
    assert find_credentials("http://127.0.0.1:9000/", environ=environ).api_key == "sk_stored"


def test_without_a_key_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated) as caught:
        find_credentials(environ={"HOME": str(tmp_path)})
    assert caught.value.code == "no-credentials"
    assert "SPACE_API_KEY" in caught.value.message
    assert "scripts/up" in caught.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_credentials(environ=write(tmp_path, STORED, mode))
    assert caught.value.code == "credentials-not-private"
    assert "chmod 600" in caught.value.message


@pytest.mark.parametrize("content", ["", "sk_plain", "[]", "{}", '{"url": "http://x"}'])
def test_a_file_without_a_key_is_an_error_and_not_ignored(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_credentials(environ=write(tmp_path, content))
    assert caught.value.code == "credentials-malformed"


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://host", "http://", "http://[", "file:///etc/passwd"])
def test_an_address_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_credentials(url, "sk_x", {})
    assert caught.value.code == "invalid-url"


def test_the_config_directory_can_be_moved(tmp_path: Path) -> None:
    environ = {"HOME": "/nonexistent", "XDG_CONFIG_HOME": str(tmp_path)}
    assert credentials_file(environ) == tmp_path / "space/credentials"


def test_a_key_is_in_no_repr() -> None:
    assert "sk_secret" not in repr(Credentials("http://x", "sk_secret"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_a_typed_error(tmp_path: Path) -> None:
    environ = write(tmp_path, STORED)
    path = credentials_file(environ)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            find_credentials(environ=environ)
        except (InvalidRequest, Unauthenticated):
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert path.exists()


def test_what_e2bs_clients_need_is_the_key_in_their_form_and_where_everything_is():
    key = "sk_" + "A" * 43
    told = e2b_environment("http://x:1", None, key)
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), "http://x:1")
    assert told == {"E2B_API_KEY": "e2b_" + "00" * 32, **urls}
    assert e2b_environment("http://x:1", "sbx.test:1", key) == {
        "E2B_API_KEY": "e2b_" + "00" * 32,
        "E2B_DOMAIN": "sbx.test:1",
    }
    with pytest.raises(NotFound) as refused:
        e2b_environment(None, None, key)
    assert refused.value.code == "no-e2b"
