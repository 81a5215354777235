"""The rate of a link: how it is written, and the token bucket that makes it."""

import re

from rowmesh.errors import InputError

__all__ = ["format_rate", "parse_rate"]

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LOW, _HIGH = 10**6, 10**11


def parse_rate(text: str | None) -> int | None:
    """Bits per second of ``200mbit``, ``1gbit`` or ``1.5gbit``; None for ``none`` and None.

    Units are powers of 1,000, as ``tc`` has them.

    Raises:
        InputError: If ``text`` is anything else, or not from 1 Mbit/s to 100 Gbit/s.
    """
    if text is None or text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(\w+)", text)
    if match is None or match[2] not in _UNITS:
        raise InputError(
            f"rate is {text!r}, but must be none or a number of kbit, mbit or gbit, as 200mbit"
        )
    bits = round(float(match[1]) * _UNITS[match[2]])
    if not _LOW <= bits <= _HIGH:
        raise InputError(f"rate is {text}, but must be from 1mbit to 100gbit")
    return bits


def format_rate(bits: int | None) -> str:
    """The shortest text that `parse_rate` reads as ``bits``.

    >>> format_rate(1_500_000_000)
    '1.5gbit'
    """
    if bits is None:
        return "none"
    unit = max((u for u in _UNITS if bits >= _UNITS[u]), key=_UNITS.__getitem__)
    whole, part = divmod(bits, _UNITS[unit])
    digits = f"{part:0{len(str(_UNITS[unit])) - 1}d}".rstrip("0")
    return f"{whole}{'.' if digits else ''}{digits}{unit}"
