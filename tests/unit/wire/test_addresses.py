"""The address of a caller behind proxies."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimitd_wire.addresses import MAX_HOPS, ClientAddresses, address_of

PROXIES = ClientAddresses(["10.0.0.0/8", "192.0.2.1", "2001:db8:ffff::/48"])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        (" 192.0.2.7\t", "192.0.2.7"),
        ('"192.0.2.7"', "192.0.2.7"),
        ("192.0.2.7:80", "192.0.2.7"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ('"[2001:db8::1]:8443"', "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("[fe80::1%eth0]:80", "fe80::1"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("[::ffff:192.0.2.7]:80", "192.0.2.7"),
        ("", None),
        ("unknown", None),
        ("_hidden", None),
        ("192.0.2", None),
        ("192.0.2.07", None),
        ("192.0.2.7 192.0.2.8", None),
        ("[" * 65, None),
        ("1" * 100_000, None),
    ],
)
def test_an_address_is_read_without_brackets_zone_and_port(text, address):
    found = address_of(text)
    assert (found if found is None else str(found)) == address


def test_without_trusted_proxies_no_header_counts():
    assert ClientAddresses().of("192.0.2.7", ["203.0.113.1"]) == "192.0.2.7"


def test_a_header_of_an_untrusted_peer_does_not_count():
    assert PROXIES.of("192.0.2.7", ["203.0.113.1"]) == "192.0.2.7"


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        ([], "10.0.0.1"),
        ([""], "10.0.0.1"),
        (["203.0.113.9"], "203.0.113.9"),
        # Entries further left are the caller's.
        (["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        (["198.51.100.1", "203.0.113.9"], "203.0.113.9"),
        (["198.51.100.1, 203.0.113.9, 10.2.0.1, 192.0.2.1"], "203.0.113.9"),
        (["198.51.100.1, 203.0.113.9", "10.2.0.1,192.0.2.1:80"], "203.0.113.9"),
        (["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        # An entry that is not an address ends the search at the last trusted one.
        (["203.0.113.9, nonsense"], "10.0.0.1"),
        (["203.0.113.9, nonsense, 10.0.0.2"], "10.0.0.2"),
        (["203.0.113.9,,10.0.0.2"], "10.0.0.2"),
    ],
)
def test_behind_proxies_the_last_untrusted_entry_is_the_caller(lines, address):
    assert PROXIES.of("10.0.0.1", lines) == address


def test_a_proxy_is_trusted_in_every_form_of_its_address():
    assert PROXIES.of("::ffff:10.0.0.1", ["203.0.113.9"]) == "203.0.113.9"
    assert PROXIES.of("2001:db8:ffff::1", ["203.0.113.9"]) == "203.0.113.9"


@pytest.mark.parametrize("proxy", ["::ffff:10.0.0.1", "::ffff:10.0.0.0/104", "::ffff:0:0/96"])
def test_a_proxy_is_trusted_in_every_form_of_its_setting(proxy):
    assert ClientAddresses([proxy]).of("::ffff:10.0.0.1", ["203.0.113.9"]) == "203.0.113.9"
    assert ClientAddresses([proxy]).of("2001:db8::1", ["203.0.113.9"]) == "2001:db8::"


def test_a_unix_socket_has_no_address_and_may_be_trusted():
    assert PROXIES.of(None, ["203.0.113.9"]) is None
    assert PROXIES.of("", ["203.0.113.9"]) is None
    assert ClientAddresses(["unix"]).of(None, ["198.51.100.1, 203.0.113.9"]) == "203.0.113.9"
    assert ClientAddresses(["unix"]).of("", []) is None
    assert ClientAddresses(["unix"]).of("192.0.2.7", ["203.0.113.9"]) == "192.0.2.7"


def test_a_peer_that_is_not_an_address_has_none():
    assert PROXIES.of("testclient", ["203.0.113.9"]) is None


def test_addresses_of_ipv6_count_by_their_first_64_bits():
    assert PROXIES.of("2001:db8:1:2:3:4:5:6") == "2001:db8:1:2::"
    assert ClientAddresses(ipv6_prefix=48).of("2001:db8:1:2::7") == "2001:db8:1::"
    assert ClientAddresses(ipv6_prefix=128).of("2001:db8:1:2::7") == "2001:db8:1:2::7"
    assert PROXIES.of("::ffff:198.51.100.7") == "198.51.100.7"


@settings(max_examples=60)
@given(st.lists(st.text(max_size=80), max_size=3), st.text(max_size=80))
def test_entries_written_by_the_caller_have_no_effect(lines, start):
    assert PROXIES.of("203.0.113.9", [*lines, start]) == "203.0.113.9"
    assert PROXIES.of("10.0.0.1", [*lines, f"{start},203.0.113.9"]) == "203.0.113.9"


@settings(max_examples=60)
@given(st.text(max_size=80), st.lists(st.text(max_size=80), max_size=3))
def test_the_answer_is_an_address_or_none(peer, lines):
    for found in (PROXIES.of(peer, lines), PROXIES.of("10.0.0.1", [peer, *lines])):
        assert found is None or ipaddress.ip_address(found)


class CountedLines(list):
    """Lines of a header that count the lines read."""

    looked_at = 0

    def __reversed__(self):
        for line in super().__reversed__():
            self.looked_at += 1
            yield line


@pytest.mark.parametrize("line", ["10.0.0.2", "10.0.0.2," * 7_000 + "10.0.0.2"])
def test_the_number_of_hops_read_is_bounded(line):
    lines = CountedLines([line] * 5_000)
    assert PROXIES.of("10.0.0.1", lines) == "10.0.0.2"
    assert lines.looked_at <= MAX_HOPS + 1


def test_a_long_header_does_not_hide_the_entry_of_the_proxy():
    assert PROXIES.of("10.0.0.1", ["1.1.1.1," * 8_000 + "203.0.113.9"]) == "203.0.113.9"
    assert PROXIES.of("10.0.0.1", ["x" * 65_536 + ",203.0.113.9"]) == "203.0.113.9"


@pytest.mark.parametrize("proxies", [["10.0.0.0/33"], ["proxy.internal"], [""], [10]])
def test_an_invalid_proxy_address_is_named(proxies):
    with pytest.raises(ValueError, match="trusted_proxies"):
        ClientAddresses(proxies)


def test_a_single_text_in_place_of_a_list_is_refused():
    with pytest.raises(TypeError, match="trusted_proxies"):
        ClientAddresses("10.0.0.1")


@pytest.mark.parametrize("prefix", [0, 129])
def test_an_invalid_ipv6_prefix_is_refused(prefix):
    with pytest.raises(ValueError, match="ipv6_prefix"):
        ClientAddresses(ipv6_prefix=prefix)


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("fd00::1", True), ("192.0.2.1", False),
     ("", True), (None, True), ("unix", False), ("proxy", False), ("10.1.2.3" * 20, False)],
)  # fmt: skip
def test_a_peer_is_trusted_only_by_its_address(peer, trusted):
    proxies = ["10.0.0.0/8", "fd00::/8"]
    assert ClientAddresses([*proxies, "unix"]).trusts(peer) is trusted
    assert ClientAddresses(proxies).trusts(peer) is (trusted and bool(peer))
