"""Addresses of pools of services, as settings name them."""

from __future__ import annotations

DNS = "dns:///"
"""Before a name whose addresses are the pods."""


def parse_addresses(text: str) -> list[str]:
    """Reads a list of addresses.

    Args:
        text: HOST:PORT or dns:///NAME:PORT, separated by commas.

    Returns:
        The addresses, at least one.

    Raises:
        ValueError: If there is none, or one is malformed; names it.
    """
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    if not addresses:
        raise ValueError("must name at least one HOST:PORT")
    for address in addresses:
        host, separator, port = address.removeprefix(DNS).rpartition(":")
        if not (separator and host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"must be HOST:PORT or dns:///NAME:PORT (got {address!r})")
    return addresses
