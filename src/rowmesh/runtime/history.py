"""What a rank's optimiser has done, as a number in the status word of every forward.

A rank that calls `zero_grad` where others call `step`, or steps at another rate, posts the same
messages as they do: nothing else would notice. The number costs no byte: the status word has room.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import StepError

__all__ = ["History", "rates_of", "word_of"]

_FLAG_BITS = 8  # of the status word, below the number
_PLAIN = (bool, int, float, str, type(None))
_RATE_BITS, _DROP_BITS, _STEP_BITS = 24, 8, 16


class History:
    """Steps, gradients dropped without one, and the rates of the last step."""

    def __init__(self) -> None:
        self._num_steps = self._num_drops = self._digest = 0
        self._rates: dict[str, str] = {}

    def step(self, groups: list[dict[str, Any]]) -> None:
        """Gradients were used, with the settings of these param groups."""
        self._num_steps += 1
        self._rates = rates_of(groups)
        self._digest = zlib.crc32(repr(self._rates).encode())

    def drop(self) -> None:
        """Gradients were forgotten."""
        self._num_drops += 1

    @property
    def status(self) -> int:
        """For the status word; its lowest bits are others'."""
        word = self._num_steps % (1 << _STEP_BITS)
        word = (word << _DROP_BITS) | self._num_drops % (1 << _DROP_BITS)
        word = (word << _RATE_BITS) | self._digest % (1 << _RATE_BITS)
        return word << _FLAG_BITS

    def check(self, words: Sequence[int], mesh: Mesh) -> None:
        """Raise if ranks have done different things.

        Args:
            words: The status word of every rank.
            mesh: Of these ranks.

        Collective:
            All ranks, with the same words.
        """
        numbers = [word >> _FLAG_BITS for word in words]
        rank = next((r for r, number in enumerate(numbers) if number != numbers[0]), None)
        if rank is None:
            return
        steps, drops = (
            _difference(numbers[rank] >> low, numbers[0] >> low, bits)
            for low, bits in ((_RATE_BITS + _DROP_BITS, _STEP_BITS), (_RATE_BITS, _DROP_BITS))
        )
        if steps or drops:
            raise StepError(
                f"ranks disagree about what became of gradients: rank {rank} has made "
                f"{_more(steps)} steps than rank 0, and dropped gradients without a step "
                f"{_more(drops)} times: call opt.step() and opt.zero_grad() on all ranks alike"
            )
        rates: list[Mapping[str, str]] = mesh.gather_objects(self._rates, edge=None)
        keys = dict.fromkeys(key for found in (rates[0], rates[rank]) for key in found)
        what = next((k for k in keys if rates[0].get(k) != rates[rank].get(k)), "a setting")
        raise StepError(
            f"ranks disagree about the last step: {what} was {rates[0].get(what)} on rank 0 and "
            f"{rates[rank].get(what)} on rank {rank}: set it alike on all ranks"
        )


def _difference(number: int, other: int, bits: int) -> int:
    """Of the lowest bits, which count modulo their number."""
    size = 1 << bits
    return (number - other + size // 2) % size - size // 2


def _more(difference: int) -> str:
    return f"{abs(difference)} {'fewer' if difference < 0 else 'more'}"


def rates_of(groups: list[dict[str, Any]]) -> dict[str, str]:
    """The settings of an optimiser's param groups."""
    return {
        f"{key} of param group {group.get('name', number)}": word_of(value)
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key not in ("params", "name")
    }


def word_of(value: Any) -> str:
    """A setting, alike on ranks where it is alike: no addresses of objects."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return repr(value.item())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(word_of, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key}: {word_of(each)}' for key, each in value.items())})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
