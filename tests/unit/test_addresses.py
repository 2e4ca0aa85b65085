"""Which addresses are public, and every way to write one that is not."""

import ipaddress

import pytest

from space.model.addresses import Allowed, as_address, is_public


@pytest.mark.parametrize(
    "text",
    [
        "1.1.1.1",
        "93.184.216.34",
        "172.15.0.1",
        "172.32.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "11.0.0.1",
        "2606:4700::1111",
        "2a00:1450:4001::1",
    ],
)
def test_addresses_of_the_public_internet_are_public(text: str):
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.0.1",
        "100.64.0.1",
        "169.254.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "192.88.99.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1111%eth0",
        "fc00::1",
        "fd00::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "3fff::1",
        "100::1",
        "5f00::1",
        "4000::1",
    ],
)
def test_addresses_of_a_host_a_link_or_nobody_are_not_public(text: str):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
    ],
)
def test_where_clouds_answer_their_guests_is_not_public(text: str):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "::ffff:1.1.1.1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "::1.1.1.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::101:101",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "2002:101:101::1",
        "2001:0:7f00:1::1",
        "2001:10::1",
        "2001:20::1",
    ],
)
def test_an_address_that_stands_for_another_is_not_public_even_where_the_other_is(text: str):
    assert not is_public(ipaddress.ip_address(text))


def test_an_operator_allows_names_and_networks():
    allowed = Allowed(["Hooks.Internal.", "10.20.0.0/16", "fd00:1::/32", "192.168.1.7"])
    assert allowed.name("hooks.internal")
    assert allowed.name("HOOKS.internal.")
    assert not allowed.name("a.hooks.internal")
    assert allowed.address(ipaddress.ip_address("10.20.3.4"))
    assert allowed.address(ipaddress.ip_address("fd00:1::9"))
    assert allowed.address(ipaddress.ip_address("192.168.1.7"))
    assert not allowed.address(ipaddress.ip_address("10.21.0.1"))
    assert not allowed.address(ipaddress.ip_address("::ffff:10.20.3.4"))
    assert allowed.host("10.20.3.4")
    assert not allowed.host("10.21.0.1")


@pytest.mark.parametrize(
    "text", ["127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "[::1]", "good.example", "", "1.2.3.4."]
)
def test_only_the_one_way_to_write_an_address_is_read_as_one(text: str):
    assert as_address(text) is None
