"""Codecs by themselves: what becomes of numbers, what of NaN, how many bytes there are."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh import native
from rowmesh.comm.codecs import (
    Codec,
    Message,
    RowInt8,
    coded,
    coded_flat,
    make_codecs,
    settle,
    wire_bytes,
)
from rowmesh.errors import InputError
from rowmesh.placement.codecs import (
    CHUNK,
    GRADIENT_EDGES,
    WIRE_CODECS,
    WireForm,
    describe_codecs,
    parse_codecs,
)
from tests.test_native import needs_library, plain

EDGES = ("rows", "pooled", *GRADIENT_EDGES)
LOSSY = [(name, edge) for name in WIRE_CODECS[1:] for edge in ("rows", "backward")]
FEW = settings(derandomize=True, deadline=None, max_examples=30)


def codec_of(name: str, edge: str = "backward") -> Codec:
    return make_codecs(WireForm(((edge, name),)))[edge]


def carry(block: torch.Tensor, codec: Codec) -> torch.Tensor:
    """What a receiver has of ``block``."""
    sent, found = coded(block, codec), torch.full_like(block, 7.0)
    arrived = coded(found, codec)
    assert isinstance(sent, Message)
    assert isinstance(arrived, Message)
    arrived.received().copy_(sent.sent())
    arrived.decode()
    return found


@st.composite
def blocks(draw: st.DrawFn) -> torch.Tensor:
    """Rows of very different sizes, some of zeros."""
    rows, dim = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 7, 16, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    powers = draw(st.lists(st.integers(-30, 12), min_size=rows, max_size=rows))
    sizes = torch.tensor([2.0**p if p < 12 else 0.0 for p in powers])
    return torch.randn(rows, dim, generator=generator) * sizes.unsqueeze(1)


@pytest.mark.parametrize("edge", EDGES)
def test_fp32_is_no_codec_nothing_is_copied(edge: str) -> None:
    block = torch.randn(3, 4)
    codec = codec_of("fp32", edge)
    assert coded(block, codec) is block
    assert coded(block, codec, others=(1, codec)) is block
    assert coded_flat(block.view(-1), codec, 5).data_ptr() == block.data_ptr()


@FEW
@given(block=blocks())
def test_bf16_keeps_eight_bits(block: torch.Tensor) -> None:
    for edge in ("rows", "backward"):
        error = (carry(block, codec_of("bf16", edge)) - block).abs()
        assert bool((error <= 2.0**-8 * block.abs()).all())


@FEW
@given(block=blocks())
def test_fp16_gradients_of_any_size_keep_eleven_bits(block: torch.Tensor) -> None:
    error = (carry(block, codec_of("fp16")) - block).abs()
    bound = torch.maximum(2.0**-11 * block.abs(), 2.0**-39 * block.abs().amax(1, keepdim=True))
    assert bool((error <= bound).all())


def test_fp16_rows_are_not_scaled() -> None:
    block = torch.tensor([[1.0, 1e-3, 1e-8, 1e6]])
    found = carry(block, codec_of("fp16", "rows"))
    assert torch.equal(found, block.half().float())
    assert found[0, 2] == 0.0
    assert found[0, 3] == torch.inf


@FEW
@given(block=blocks())
def test_int8_is_within_half_a_step_of_the_rows_scale(block: torch.Tensor) -> None:
    scale = block.abs().amax(1, keepdim=True) / 127
    error = (carry(block, codec_of("int8")) - block).abs()
    assert bool((error <= (0.5 + 1e-4) * scale).all())


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e38, 3.3e38])
@pytest.mark.parametrize(("name", "edge"), LOSSY)
def test_extreme_rows_stay_finite_where_they_can(name: str, edge: str, size: float) -> None:
    block = torch.tensor([[1.0, -0.5, 0.0]]) * size
    found = carry(block, codec_of(name, edge))
    if name == "fp16" and edge == "rows":
        assert not bool(found.isnan().any())
        return
    if size != 3.3e38 or name != "bf16":
        assert bool(found.isfinite().all())
    assert found[0, 2] == 0.0
    if size >= 1e-30:
        assert torch.allclose(found, block, rtol=0.02)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "edge"), LOSSY)
def test_what_is_not_finite_stays_so_and_hurts_no_other_row(
    name: str, edge: str, bad: float
) -> None:
    block = torch.randn(5, 6)
    clean = carry(block, codec_of(name, edge))
    block[2, 3] = bad
    found = carry(block, codec_of(name, edge))
    assert not bool(found[2, 3].isfinite())
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(("name", "edge"), LOSSY)
def test_a_row_becomes_the_same_whatever_travels_with_it(name: str, edge: str) -> None:
    block = torch.randn(9, 16) * torch.logspace(-9, 3, 9).unsqueeze(1)
    codec = codec_of(name, edge)
    whole, parts = carry(block, codec), [carry(block[i : i + 3], codec) for i in (0, 3, 6)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("name", WIRE_CODECS[1:])
def test_a_sender_that_settles_has_what_receivers_have(name: str) -> None:
    block, codec = torch.randn(4, 5), codec_of(name)
    theirs, parcel = carry(block, codec), coded(block, codec)
    settle(parcel)
    assert torch.equal(block, theirs)


@FEW
@given(block=blocks(), names=st.tuples(*[st.sampled_from(WIRE_CODECS)] * 2), cut=st.integers(0, 9))
def test_a_message_of_two_codecs_is_two_messages(
    block: torch.Tensor, names: tuple[str, str], cut: int
) -> None:
    first, second = (codec_of(name, edge) for name, edge in zip(names, EDGES, strict=False))
    cut = min(cut, len(block))
    parcel = coded(block, first, others=(cut, second))
    if isinstance(parcel, torch.Tensor):
        assert names == ("fp32", "fp32")
        return
    size = wire_bytes(block[:cut], first) + wire_bytes(block[cut:], second)
    assert parcel.sent().numel() == size
    before = block.clone()
    settle(parcel)
    for part, old, codec in (
        (block[:cut], before[:cut], first),
        (block[cut:], before[cut:], second),
    ):
        alone = coded(old, codec)
        settle(alone)
        assert torch.equal(part, old)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", WIRE_CODECS)
def test_the_formulas_of_bytes_are_those_of_messages(name: str, edge: str) -> None:
    form = WireForm(((edge, name),))
    codec = codec_of(name, edge)
    for rows, dim in itertools.product((0, 1, 5), (1, 3, 64)):
        block = torch.zeros(rows, dim)
        assert wire_bytes(block, codec) == rows * form.vector_bytes(edge, dim)
    for size, values in ((0, 0), (1, 0), (CHUNK, 5), (3 * CHUNK + 7, 2 * CHUNK), (300, 299)):
        parcel = coded_flat(torch.zeros(size), codec, values)
        sent = parcel if isinstance(parcel, torch.Tensor) else parcel.sent()
        assert sent.numel() * sent.element_size() == form.flat_bytes(edge, size)


def test_bytes_of_a_vector_in_figures() -> None:
    found = {
        (name, edge): WireForm(((edge, name),)).vector_bytes(edge, 64)
        for name in WIRE_CODECS
        for edge in ("rows", "backward")
    }
    assert found == {
        ("fp32", "rows"): 256,
        ("fp32", "backward"): 256,
        ("fp16", "rows"): 128,
        ("fp16", "backward"): 129,
        ("bf16", "rows"): 128,
        ("bf16", "backward"): 128,
        ("int8", "rows"): 68,
        ("int8", "backward"): 68,
    }


def test_rows_of_16_bits_travel_as_they_are() -> None:
    block = torch.randn(3, 4).half()
    assert coded(block, codec_of("int8")) is block
    assert wire_bytes(block, codec_of("int8")) == 24


@pytest.mark.parametrize("name", WIRE_CODECS[1:])
@pytest.mark.parametrize("values", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3, 3 * CHUNK])
def test_counts_in_a_bucket_are_exact_whatever_the_gradients_are(name: str, values: int) -> None:
    counts = torch.arange(200.0)
    vector = torch.cat([torch.full((values,), 1e9), counts])
    settle(coded_flat(vector, codec_of(name, "dense"), values))
    assert torch.equal(vector[values:][:128], counts[:128])
    assert bool((vector[values:][128:] > 0).all())
    assert torch.allclose(vector[:values], torch.tensor(1e9), rtol=0.01)


def test_a_scale_that_is_forgotten_or_anothers_breaks_the_bound() -> None:
    block, codec = torch.tensor([[1.0, 2.0], [300.0, -100.0]]), RowInt8()
    for change in (lambda scale: scale.fill_(1.0), lambda scale: scale.copy_(scale.flip(0))):
        message = Message([(block.clone(), codec)])
        message.sent()
        change(message._parts[0])
        message.decode()
        error = (message._blocks[0][0] - block).abs()
        assert bool((error > 0.51 * block.abs().amax(1, keepdim=True) / 127).any())


def test_codecs_are_words_or_pairs() -> None:
    def edges(text: str) -> str:
        return describe_codecs(parse_codecs(text))

    assert edges("fp32") == "none"
    assert (
        edges("bf16")
        == "rows: bf16, pooled: bf16, backward: bf16, hot gradients: bf16, dense: bf16"
    )
    assert edges("forward=fp16, backward=bf16") == (
        "rows: fp16, pooled: fp16, backward: bf16, hot gradients: bf16"
    )
    assert edges("int8,dense=fp32,rows=fp16").startswith("rows: fp16, pooled: int8, backward: int8")
    assert "dense" not in edges("int8,dense=fp32")
    assert edges("dense=int8,hot gradients=bf16") == "hot gradients: bf16, dense: int8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf61", "unknown codec 'bf61': did you mean 'bf16'"),
        ("", "unknown codec ''"),
        ("forward=fp8", "unknown codec 'fp8'"),
        ("foward=fp16", "unknown edge 'foward': did you mean 'forward'"),
        ("qqq=fp16", "unknown edge 'qqq': known are backward, dense, forward"),
    ],
)
def test_unknown_words_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_codecs(text)


@needs_library
@FEW
@given(block=blocks(), flags=st.integers(0, 3))
def test_compiled_int8_is_the_torch_path_bit_by_bit(block: torch.Tensor, flags: int) -> None:
    block[:, 0] *= 1.5  # a tie now and then
    messages = []
    for path in (plain, contextlib.nullcontext):
        with path():
            out = torch.zeros_like(block)
            message = coded_flat(block.view(-1), RowInt8(), block.numel() - flags)
            arrived = coded_flat(out.view(-1), RowInt8(), block.numel() - flags)
            assert isinstance(message, Message)
            assert isinstance(arrived, Message)
            arrived.received().copy_(message.sent())
            arrived.decode()
            messages.append((message.sent(), out))
    (slow, slow_out), (fast, fast_out) = messages
    assert torch.equal(slow, fast)
    assert torch.equal(slow_out.view(torch.int32), fast_out.view(torch.int32))


@needs_library
@pytest.mark.parametrize("steps", [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0])
def test_compiled_int8_rounds_ties_to_even(steps: float) -> None:
    block = torch.tensor([[127.0, steps]])
    scales, found = torch.empty(1), torch.empty(2, dtype=torch.int8)
    assert native.encode_int8(block, scales, found)
    assert scales.item() == 1.0
    assert found.tolist() == [127, round(steps)]


@needs_library
def test_what_int8_kernels_do_not_know_is_left_to_torch() -> None:
    scales, steps = torch.empty(2), torch.empty(6, dtype=torch.int8)
    for block in (torch.ones(2, 3).double(), torch.ones(3, 2).t(), torch.ones(2, 4)):
        assert not native.encode_int8(block, scales, steps)
        assert not native.decode_int8(scales, steps, block)
