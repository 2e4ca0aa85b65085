"""Who a user is, by the guest's own files."""

from pathlib import Path

import pytest

from space.guest.system import Refused
from space.guest.users import find_identity, names

PASSWD = """root:x:0:0:root:/root:/bin/bash
user:x:1000:1000:,,,:/home/user:/bin/zsh
1000:x:1001:1001::/home/number:
short:x:7
broken:x:abc:1::/:
huge:x:99999999999:1::/:
empty:x:1002:1002:::
"""
GROUP = """root:x:0:
user:x:1000:
extra:x:2000:user,other
more:x:2001:other,user
broken:x:x:user
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text(GROUP)
    return str(tmp_path)


def test_root_is_there_without_any_entry(tmp_path: Path) -> None:
    """A template may hold next to nothing."""
    for user in ("root", "root:root", "0"):
        identity = find_identity(user, str(tmp_path))
        assert (identity.uid, identity.gid, identity.home, identity.shell) == (0, 0, "/", "/bin/sh")
    with pytest.raises(Refused):
        find_identity("user", str(tmp_path))


@pytest.mark.parametrize(
    ("user", "uid", "gid", "groups", "home", "shell"),
    [
        ("root", 0, 0, (), "/root", "/bin/bash"),
        ("user", 1000, 1000, (2000, 2001), "/home/user", "/bin/zsh"),
        ("1000", 1001, 1001, (), "/home/number", "/bin/sh"),
        ("1002", 1002, 1002, (), "/", "/bin/sh"),
        ("user:extra", 1000, 2000, (2000, 2001), "/home/user", "/bin/zsh"),
        ("user:77", 1000, 77, (2000, 2001), "/home/user", "/bin/zsh"),
        ("4000", 4000, 4000, (), "/", "/bin/sh"),
        ("4000:extra", 4000, 2000, (), "/", "/bin/sh"),
    ],
)
def test_users_are_found_by_name_or_number(
    root: str, user: str, uid: int, gid: int, groups: tuple[int, ...], home: str, shell: str
):
    identity = find_identity(user, root)
    assert (identity.uid, identity.gid, identity.groups, identity.home, identity.shell) == (
        uid,
        gid,
        groups,
        home,
        shell,
    )


@pytest.mark.parametrize(
    "user", ["nobody", "", ":", "short", "broken", "huge", "-1", "4294967295", "99999999999999999999", "٣"]
)
def test_who_is_not_there_is_refused(root: str, user: str):
    with pytest.raises(Refused) as refusal:
        find_identity(user, root)
    assert refusal.value.failure["code"] == "no-such-user"


def test_a_group_that_is_not_there_is_refused(root: str):
    with pytest.raises(Refused, match="group"):
        find_identity("user:nonesuch", root)


def test_changes_of_the_files_are_seen_at_once(root: str):
    assert find_identity("user", root).uid == 1000
    Path(root, "etc/passwd").write_text(PASSWD.replace("user:x:1000", "user:x:1717"))
    assert find_identity("user", root).uid == 1717
    Path(root, "etc/passwd").unlink()
    with pytest.raises(Refused):
        find_identity("user", root)


def test_one_identity_is_not_changed_through_another(root: str):
    assert find_identity("user:77", root).gid == 77
    assert find_identity("user", root).gid == 1000


def test_a_file_that_never_ends_is_cut(root: str):
    with Path(root, "etc/passwd").open("a") as file:
        file.truncate(1 << 30)
    assert find_identity("user", root).uid == 1000


def test_names_are_those_of_the_first_entry(root: str):
    users, groups = names(root)
    assert users[0] == "root"
    assert users[1000] == "user"
    assert groups[2001] == "more"
