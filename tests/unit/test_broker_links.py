"""Names and addresses of links follow from the instance and an index alone, and never meet."""

import ipaddress
import re

from hypothesis import given
from hypothesis import strategies as st

from space.broker.addressing import LINKS_MAX, RANGE_V4, link, netns_name
from space.model.ids import new_id

instances = st.from_regex(re.compile(r"[a-z][a-z0-9]{0,7}"), fullmatch=True)
indexes = st.integers(0, LINKS_MAX - 1)


@given(instances, indexes)
def test_a_links_names_fit_the_kernel(instance: str, index: int) -> None:
    assert len(link(instance, index).interface) <= 15
    assert len(netns_name(instance, new_id("sbx"))) <= 255


@given(instances, indexes)
def test_both_ends_are_the_two_addresses_of_one_small_network(instance: str, index: int) -> None:
    found = link(instance, index)
    assert ipaddress.ip_network((found.host_v4, 31)) == ipaddress.ip_network((found.guest_v4, 31), strict=False)
    assert found.host_v4 != found.guest_v4
    assert ipaddress.ip_network((found.host_v6, 127)) == ipaddress.ip_network((found.guest_v6, 127), strict=False)
    assert found.host_v6 != found.guest_v6


@given(instances, indexes)
def test_addresses_are_private_and_never_those_of_metadata_services_or_of_common_networks(
    instance: str, index: int
) -> None:
    found = link(instance, index)
    for address in (found.host_v4, found.guest_v4):
        assert address in RANGE_V4
        assert address.is_private
        assert not address.is_link_local
    for v6 in (found.host_v6, found.guest_v6):
        assert v6 in ipaddress.ip_network("fd00::/8")


@given(instances, indexes, indexes)
def test_two_links_of_an_installation_share_nothing(instance: str, one: int, other: int) -> None:
    first, second = link(instance, one), link(instance, other)
    shared = {first.interface, first.host_v4, first.guest_v4, first.host_v6, first.guest_v6} & {
        *(second.interface, second.host_v4, second.guest_v4, second.host_v6, second.guest_v6)
    }
    assert bool(shared) == (one == other)


@given(instances, instances, indexes)
def test_the_rules_of_one_installation_do_not_match_links_of_another(one: str, other: str, index: int) -> None:
    name = link(other, index).interface
    assert name.startswith(f"{one}-") == (one == other)
