"""Encoding of updates: exact, short, and strict about damaged or foreign bytes."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.nn.models import build
from gradveil.wire import header
from gradveil.wire.codec import Layout, WireError, decode, encode, encoded_size, fits, inspect
from gradveil.wire.header import DTYPES


def sparse(shape: tuple[int, ...], density: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)


def header_of(update: dict[str, Tensor], **options: Any) -> header.Header:
    return inspect(encode(update, **options), Layout.of(update))


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, equal_nan=True)


@given(st.data())
def test_decode_returns_the_encoded_update(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=4))
    density = data.draw(st.sampled_from([0.0, 0.003, 0.03, 0.2, 0.6, 1.0]))
    update = {
        f"t{i}": sparse(shape, density, generator).to(data.draw(st.sampled_from(DTYPES)))
        for i, shape in enumerate(shapes)
    }
    update["long"] = sparse((1 << data.draw(st.integers(0, 14)),), density, generator)
    mask = None
    if data.draw(st.booleans()):
        mask = {
            name: (value != 0) | (torch.rand(value.shape, generator=generator) < 0.2) for name, value in update.items()
        }
    encoded = encode(update, mask=mask, deflate=data.draw(st.booleans()))
    same(decode(encoded, Layout.of(update), mask=mask), update)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("density", [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.38, 0.5])
def test_encode_large_tensor_is_near_the_entropy(density: float, bits: int, generator: torch.Generator) -> None:
    n = 400_000
    update = {"w": sparse((n,), density, generator)}
    k = int(update["w"].count_nonzero())
    d = k / n
    bound = (-n * (d * math.log2(d) + (1 - d) * math.log2(1 - d)) + bits * k) / 8
    encoded = encode(update, values=torch.float16 if bits == 16 else None)
    assert bound <= len(encoded) <= 1.01 * bound


@pytest.mark.parametrize("model", ["lenet-zhu", "mnist-conv", "cnn6", "resnet20"])
@pytest.mark.parametrize("values", [torch.float32, torch.float16])
@pytest.mark.parametrize("density", [0.01, 0.02, 0.05, 0.1, 0.2, 0.38, 0.5])
def test_encode_small_network_is_near_the_entropy(
    model: str, density: float, values: torch.dtype, generator: torch.Generator
) -> None:
    net = build(model, channels=3, size=32, classes=10, generator=generator)
    update = {name: sparse(tuple(p.shape), density, generator) for name, p in net.named_parameters()}
    n, k = (sum(count) for count in zip(*((v.numel(), int(v.count_nonzero())) for v in update.values()), strict=True))
    d = k / n
    bound = (-n * (d * math.log2(d) + (1 - d) * math.log2(1 - d)) + 8 * values.itemsize * k) / 8
    assert len(encode(update, values=values)) <= 1.07 * bound


def test_encode_groups_tensors_of_one_density(generator: torch.Generator) -> None:
    """Dense biases between sparse weights stay alone; tensors of one density share a header, up to a size."""
    shapes = {f"{i}.{kind}": shape for i in range(3) for kind, shape in (("bias", (12,)), ("weight", (12, 12, 5, 5)))}
    mixed = {name: sparse(shape, 0.01 if len(shape) > 1 else 1.0, generator) for name, shape in shapes.items()}
    assert [entry.names for entry in header_of(mixed).entries] == [(name,) for name in shapes]
    assert [entry.low is None for entry in header_of(mixed).entries] == [True, False] * 3
    even = {name: sparse(shape, 0.05, generator) for name, shape in shapes.items()}
    assert [entry.names for entry in header_of(even).entries] == [tuple(shapes)]
    same(decode(encode(even), Layout.of(even)), even)
    large = {str(i): sparse((1 << 15,), 0.05, generator) for i in range(5)}
    assert [len(entry.names) for entry in header_of(large).entries] == [2, 2, 1]


def test_decode_grouped_tensors_share_no_memory() -> None:
    update = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5)}
    arrived = decode(encode(update), Layout.of(update))
    assert len(header_of(update).entries) == 1
    assert len({value.untyped_storage().data_ptr() for value in arrived.values()}) == 3


def test_decode_other_layout_raises_with_both_digests() -> None:
    update = {"w": torch.ones(2, 3), "b": torch.ones(2)}
    encoded, own = encode(update), Layout.of(update)
    for other in ({**update, "w": torch.ones(3, 2)}, {**update, "w": update["w"].half()}, {"w": update["w"]}):
        layout = Layout.of(other)
        for read in (decode, inspect):
            with pytest.raises(WireError, match=f"{own.digest().hex()}, expected {layout.digest().hex()}"):
                read(encoded, layout)
    assert fits(encoded, own)
    assert not fits(encoded, Layout.of({"w": update["w"]}))


def test_layout_digest_depends_on_names_shapes_and_dtypes_but_not_order() -> None:
    layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    assert layout.digest() == Layout.of({"b": torch.zeros(2), "w": torch.zeros(2, 3)}).digest()
    others = (
        {"w": torch.zeros(3, 2), "b": torch.zeros(2)},
        {"w": torch.zeros(2, 3), "c": torch.zeros(2)},
        {"w": torch.zeros(2, 3).half(), "b": torch.zeros(2)},
        {"w": torch.zeros(2, 3), "b": torch.zeros(2, 1)},
        {"w": torch.zeros(2, 3)},
        {},
    )
    assert len({layout.digest(), *(Layout.of(other).digest() for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(("dtype", "least_zeros"), [(torch.float32, 32), (torch.float16, 16), (torch.bfloat16, 16)])
def test_encode_tensor_with_few_zeros_is_dense(dtype: torch.dtype, least_zeros: int) -> None:
    value = torch.ones(1024, dtype=dtype)
    value[:-1:32][: 1024 // least_zeros] = 0
    value[1:-1:32][: 1024 // least_zeros - 32] = 0
    assert int((value == 0).sum()) == 1024 // least_zeros
    assert header_of({"w": value}).entries[0].low is None
    value[3] = 0
    assert header_of({"w": value}).entries[0].low == 0


def test_encode_value_rounded_to_zero_is_not_sent() -> None:
    value = torch.zeros(64)
    value[:3] = torch.tensor([-0.0, 1e-9, 2.0])
    assert header_of({"w": value}).entries[0].sent == 2
    encoded = encode({"w": value}, values=torch.float16)
    assert inspect(encoded, Layout.of({"w": value})).entries[0].sent == 1
    assert decode(encoded, Layout.of({"w": value}))["w"].tolist() == [0, 0, 2.0] + [0] * 61


@pytest.mark.parametrize("zeros", [1, 100])
def test_decode_zeros_have_no_sign(zeros: int) -> None:
    value = torch.cat([torch.ones(200), -torch.zeros(zeros)])
    arrived = decode(encode({"w": value}), Layout.of({"w": value}))["w"]
    assert not arrived.signbit().any()


def test_decode_narrow_values_restores_the_dtype(generator: torch.Generator) -> None:
    update = {"w": sparse((50,), 0.5, generator), "h": torch.ones(3, dtype=torch.bfloat16)}
    update["d"] = torch.tensor([1e300], dtype=torch.float64) * 0 + 1.25
    encoded = encode(update, values=torch.float16)
    entries = inspect(encoded, Layout.of(update)).entries
    travelled = {name: entry.values for entry in entries for name in entry.names}
    assert travelled == {"w": torch.float16, "h": torch.bfloat16, "d": torch.float16}
    same(decode(encoded, Layout.of(update)), {n: v if n == "h" else v.half().to(v.dtype) for n, v in update.items()})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [0, 30])
def test_nonfinite_values_raise_on_both_sides(bad: float, dtype: torch.dtype, zeros: int) -> None:
    update = {"w": torch.tensor([1.0, bad, -2.0] + [0.0] * zeros, dtype=dtype)}
    with pytest.raises(GradveilError, match="1 values are not finite"):
        encode(update)
    encoded = encode(update, nonfinite="keep")
    with pytest.raises(WireError, match="not finite"):
        decode(encoded, Layout.of(update))
    same(decode(encoded, Layout.of(update), nonfinite="keep"), update)
    for misspelt in (partial(encode, update), partial(decode, encoded, Layout.of(update))):
        with pytest.raises(GradveilError, match="nonfinite: is 'reject'"):
            misspelt(nonfinite="reject")
    largest = {"w": torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)}
    same(decode(encode(largest), Layout.of(largest)), largest)


def test_encode_value_beyond_the_range_of_float16_raises() -> None:
    with pytest.raises(GradveilError, match="not finite in float16"):
        encode({"w": torch.tensor([1.0, 7e4])}, values=torch.float16)


def test_encode_shared_mask_saves_the_positions(generator: torch.Generator) -> None:
    mask = {"w": torch.rand(10_000, generator=generator) < 0.4}
    aggregate = {"w": torch.randn(10_000, generator=generator) * mask["w"]}
    upload = {"w": aggregate["w"] * (torch.rand(10_000, generator=generator) < 0.5)}
    down, up = encode(aggregate, mask=mask), encode(upload, mask=mask)
    layout = Layout.of(aggregate)
    first, second = inspect(down, layout), inspect(up, layout)
    inside, sent = int(mask["w"].sum()), int(upload["w"].count_nonzero())
    assert first.entries[0].position_bytes == 0
    assert len(down) - first.start - 4 == 4 * inside
    # Half of the mask is sent: one bit per entry of the mask, instead of one per entry of the tensor.
    assert second.entries[0].position_bytes == pytest.approx(inside / 8, rel=0.01)
    assert len(up) - second.start - 4 == pytest.approx(4 * sent + inside / 8, rel=0.001)
    same(decode(down, layout, mask=mask), aggregate)
    same(decode(up, layout, mask=mask), upload)


def test_decode_large_tensors_with_a_sparse_mask_returns_the_update(generator: torch.Generator) -> None:
    """The limit on tensors coded together counts their entries, not those in the mask."""
    update = {name: torch.randn(60_000, generator=generator) for name in ("v", "w")} | {"b": torch.randn(3)}
    mask = {name: torch.rand(value.shape, generator=generator) < 0.05 for name, value in update.items()}
    update = {name: value * mask[name] for name, value in update.items()}
    encoded, layout = encode(update, mask=mask), Layout.of(update)
    assert [entry.names for entry in inspect(encoded, layout).entries] == [("b", "v"), ("w",)]
    same(decode(encoded, layout, mask=mask), update)


def test_decode_other_mask_raises(generator: torch.Generator) -> None:
    mask = {"w": torch.rand(100, generator=generator) < 0.4}
    update = {"w": torch.randn(100, generator=generator) * mask["w"]}
    encoded, layout = encode(update, mask=mask), Layout.of(update)
    other = {"w": mask["w"].roll(1)}
    for mismatch, data in ((other, encoded), (None, encoded), (mask, encode(update))):
        with pytest.raises(WireError, match="mask: "):
            decode(data, layout, mask=mismatch)
    outside = {"w": torch.ones(100)}
    with pytest.raises(GradveilError, match=f"{100 - int(mask['w'].sum())} entries outside the shared mask"):
        encode(outside, mask=mask)
    with pytest.raises(GradveilError, match=r"mask\.v: .*\nmask\.w: "):
        decode(encoded, layout, mask={"v": mask["w"]})


def test_encoded_size_public_masks_that_cover_the_update_are_shared(generator: torch.Generator) -> None:
    mask = {"w": torch.rand(5000, generator=generator) < 0.4, "x.w": torch.ones(10, dtype=torch.bool)}
    update = {"w": torch.randn(5000, generator=generator) * mask["w"], "x.w": torch.ones(10)}
    messages = {f"send.prune.mask.{name}": value for name, value in mask.items()}
    alone = len(encode(update, deflate=True))
    assert encoded_size(update) == alone == encoded_size(update, {"send.prune.mask.w": mask["w"]})
    assert encoded_size(update, messages) == len(encode(update, mask=mask, deflate=True)) < alone - 500
    outside = update | {"w": torch.ones(5000)}
    assert encoded_size(outside, messages) == encoded_size(outside)


def test_layout_differences_describe_both_models() -> None:
    update = {"w": torch.zeros(2, 3), "b": torch.zeros(2), "old": torch.zeros(1)}
    expected = {"w": torch.zeros(2, 4), "b": torch.zeros(2, dtype=torch.float16), "new": torch.zeros(1)}
    differences = Layout.of(expected).differences(Layout.of(update))
    assert [f"{problem.where} {problem.what}" for problem in differences] == [
        "update.w is float32 [2, 3], expected float32 [2, 4]",
        "update.b is float32 [2], expected float16 [2]",
        "update.new is missing, expected float32 [1]",
        "update.old is float32 [1], and the model has no such tensor",
    ]
    many = {f"t{i}": torch.zeros(1) for i in range(100)}
    assert Layout.of({}).differences(Layout.of(many))[-1].what == "differs in 92 more tensors"


def test_decode_keeps_the_order_of_the_layout() -> None:
    update = {"a": torch.ones(1), "b": torch.zeros(2)}
    layout = Layout.of({"b": update["b"], "a": update["a"]})
    assert list(decode(encode(update), layout)) == ["b", "a"]


def test_inspect_accounts_for_every_byte(generator: torch.Generator) -> None:
    model = build("scheliga-cnn", channels=1, size=32, classes=10, generator=generator)
    update = {name: sparse(tuple(p.shape), 0.1, generator) for name, p in model.named_parameters()}
    encoded = encode(update)
    head = inspect(encoded, Layout.of(update))
    assert [name for entry in head.entries for name in entry.names] == sorted(update)
    assert sum(entry.sent for entry in head.entries) == sum(int(value.count_nonzero()) for value in update.values())
    parts = sum(entry.position_bytes + entry.value_bytes for entry in head.entries)
    assert len(encoded) == head.start + parts + 4
    assert head.start <= 4 + 2 + 8 + 7 * len(head.entries)


def test_deflate_values_of_one_magnitude_take_little_more_than_the_sign(generator: torch.Generator) -> None:
    noise = {"w": torch.randn(20_000, generator=generator)}
    signs = {"w": noise["w"].sign() * 0.0123}
    assert len(encode(noise, deflate=True)) < 0.86 * len(encode(noise))
    assert 20_000 / 8 < len(encode(signs, deflate=True)) < 1.6 * 20_000 / 8
    same(decode(encode(signs, deflate=True), Layout.of(signs)), signs)


def test_encode_unsupported_dtypes_raises_every_problem() -> None:
    update = {"i": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(GradveilError) as caught:
        encode(update, values=torch.int8)
    assert [problem.where for problem in caught.value.problems] == ["update.i", "values"]


def test_encode_bytes_are_those_of_version_two() -> None:
    """A change of these bytes needs a new version number."""
    update = {"w": torch.tensor([[0.0, 1.5, 0.0], [0.0, 0.0, -2.0]]), "b": torch.ones(2, dtype=torch.float16)}
    expected = "475655500200 acf7e1a5e3d0f8ea 0140 01010206 003c003c44 0000c03f000000c0"
    assert encode(update)[:-4].hex() == expected.replace(" ", "")


def test_encode_ignores_requires_grad_and_strides(generator: torch.Generator) -> None:
    value = torch.randn(6, 5, generator=generator, requires_grad=True).T
    arrived: dict[str, Any] = decode(encode({"w": value}), Layout.of({"w": value}))
    assert torch.equal(arrived["w"], value)
    assert not arrived["w"].requires_grad
