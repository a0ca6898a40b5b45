"""Codecs: layouts, bytes, bounds of the error, hard numbers, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memos_hf.blocks.codecs import BlockCodec, CodecSpec, hadamard

KEY_SPECS = [
    "full",
    "int8 token",
    "int8 token 8",
    "int8 channel 16",
    "int8 tensor",
    "fp8 token",
    "fp8 channel",
    "int4 token",
    "int4 channel 32",
    "int4 token 16 hadamard symmetric",
    "int4 tensor",
    "int2 channel 8 hadamard",
    "int2 token symmetric",
]
VALUE_SPECS = [spec for spec in KEY_SPECS if "channel" not in spec]
CASES = [("key", spec) for spec in KEY_SPECS] + [("value", spec) for spec in VALUE_SPECS]


def codec(spec, role="key", head_dim=32, block_size=32, dtype=torch.float32):
    return BlockCodec(CodecSpec.parse(spec), role, head_dim, block_size, dtype)


def round_trip(states, spec, role="key"):
    encoder = codec(spec, role, states.shape[3], states.shape[2], states.dtype)
    return encoder.decode(encoder.encode(states)[0])


@pytest.mark.parametrize(("role", "spec"), CASES)
def test_encoded_tensors_are_what_the_layout_says(role, spec):
    encoder = codec(spec, role)
    encoded, damaged = encoder.encode(torch.randn(3, 2, 32, 32))
    layout = encoder.layout(2)
    assert list(encoded) == list(layout)
    for name, (shape, dtype) in layout.items():
        assert encoded[name].shape == (3, *shape) and encoded[name].dtype == dtype and encoded[name].is_contiguous()
    assert sum(t.untyped_storage().nbytes() for t in encoded.values()) == 3 * encoder.bytes_per_block(2)
    assert damaged == 0


@pytest.mark.parametrize(("role", "spec"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_gives_the_shape_and_dtype_that_were_encoded(role, spec, dtype):
    states = torch.randn(2, 3, 32, 32).to(dtype)
    decoded = round_trip(states, spec, role)
    assert decoded.shape == states.shape and decoded.dtype == dtype
    if spec == "full":
        assert torch.equal(decoded, states)


@pytest.mark.parametrize(("role", "spec"), CASES)
def test_a_spec_survives_being_written_and_read(role, spec):
    assert str(CodecSpec.parse(spec)) == spec
    assert CodecSpec.parse(str(CodecSpec.parse(spec))) == CodecSpec.parse(spec)


@pytest.mark.parametrize("head_dim", [5, 20, 64, 96])
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int2"])
def test_any_head_dim_can_be_encoded(head_dim, role, kind):
    states = torch.randn(2, 2, 16, head_dim)
    decoded = round_trip(states, f"{kind} token", role)
    assert decoded.shape == states.shape
    assert (decoded - states).abs().max() <= {"int8": 0.05, "fp8": 0.2, "int4": 0.6, "int2": 2.0}[kind]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    magnitude=st.floats(-7, 4),
    role=st.sampled_from(["key", "value"]),
    group=st.sampled_from([None, 8, 16]),
    kind=st.sampled_from(["int8", "int4", "int2"]),
    symmetric=st.booleans(),
)
def test_the_error_is_within_a_step_of_the_group_at_any_magnitude(seed, magnitude, role, group, kind, symmetric):
    states = torch.randn(2, 2, 16, 32, generator=torch.Generator().manual_seed(seed))
    states = states / states.abs().max() * 10**magnitude
    spec = CodecSpec(kind, "token", group, symmetric=symmetric and kind != "int8")
    encoder = BlockCodec(spec, role, 32, 16, torch.float32)
    error = (encoder.decode(encoder.encode(states)[0]) - states).abs()
    groups = states.unflatten(3, (-1, group or 32))
    reach = 2 * groups.abs().amax(dim=-1, keepdim=True).expand_as(groups).flatten(3)
    steps = {"int8": 254, "int4": 15, "int2": 3}[kind]
    # The smallest float16 scale is a fifth of a step at 1e-7; a fitted grid may clip the last bit of the range.
    slack = encoder.scale_unit * 2.0**-24 * steps
    assert (error <= (1.2 * reach / steps + slack)).all()


@pytest.mark.parametrize("spec", ["int8 token", "int4 token", "int4 channel 32 hadamard", "fp8 token", "int2 token"])
@pytest.mark.parametrize("value", [1e4, -1e4, 1e-7, -1e-7, 0.0])
def test_large_and_small_constants_survive(spec, value):
    states = torch.full((1, 1, 32, 64), value)
    decoded = round_trip(states, spec)
    assert decoded.isfinite().all()
    assert torch.allclose(decoded, states, rtol=0.2 if abs(value) < 1 else 0.02, atol=0)


def test_values_beyond_the_largest_are_clipped_and_stay_finite():
    states = torch.randn(1, 1, 32, 64)
    states[0, 0, 3] = 1e30
    for spec in ("int8 token", "int4 token hadamard", "fp8 token"):
        decoded = round_trip(states, spec)
        assert decoded.isfinite().all()
        assert torch.allclose(decoded[0, 0, 3], torch.tensor(16384.0), rtol=0.05)


@pytest.mark.parametrize(
    "spec", ["int8 token", "int8 channel", "int4 token", "int4 channel 32 hadamard", "int2 channel", "fp8 token"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_the_token_that_is_not_finite_suffers(spec, bad):
    states = torch.randn(2, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    damaged_states = states.clone()
    damaged_states[1, 2, 7, 5] = bad
    encoder = codec(spec, head_dim=64)
    encoded, damaged = encoder.encode(damaged_states)
    decoded = encoder.decode(encoded)
    assert damaged == 1 and decoded.isfinite().all()
    tolerance = 3 * (encoder.decode(encoder.encode(states)[0]) - states).abs().max()
    others = torch.arange(32) != 7
    assert (decoded - states).abs()[:, :, others].max() <= tolerance


def test_damaged_tokens_are_counted_once_for_all_heads():
    states = torch.randn(2, 3, 16, 8)
    states[0, :, 3] = math.nan
    states[1, 0, 3, 0] = states[1, 2, 3, 1] = math.inf
    states[1, 1, 4, 2] = -math.inf
    for spec in ("full", "int8 token"):
        assert codec(spec, head_dim=8, block_size=16).encode(states)[1] == 3


@pytest.mark.parametrize("spec", ["int4 channel 32", "int4 token 8", "int4 token hadamard", "int2 channel 8"])
def test_one_large_channel_leaves_the_others_usable(spec):
    states = torch.randn(4, 2, 32, 64, generator=torch.Generator().manual_seed(1))
    states[..., 9] *= 100
    error = (round_trip(states, spec) - states)[..., :8]
    plain = (round_trip(states, "int4 token") - states)[..., :8]
    assert error.square().mean() < plain.square().mean() / 2


def test_a_group_far_from_zero_keeps_its_zero_point_in_range():
    states = 100 + torch.randn(1, 1, 32, 8)
    for kind in ("int4", "int2"):
        assert (round_trip(states, f"{kind} channel") - states).abs().max() < 1.0 if kind == "int4" else 2.5


def test_blocks_are_encoded_alone():
    states = torch.randn(5, 2, 32, 64)
    for role, spec in CASES:
        encoder = codec(spec, role, 64)
        together, _ = encoder.encode(states)
        for index in range(5):
            alone, _ = encoder.encode(states[index : index + 1])
            for name, tensor in alone.items():
                assert torch.equal(tensor[0].float(), together[name][index].float())


def test_many_blocks_are_encoded_in_passes(monkeypatch):
    states = torch.randn(7, 2, 32, 32)
    expected, _ = codec("int4 token").encode(states)
    monkeypatch.setattr("memos_hf.blocks.codecs.ELEMENTS_PER_PASS", 2 * states[0].numel())
    encoded, _ = codec("int4 token").encode(states)
    assert all(torch.equal(encoded[name], expected[name]) for name in expected)


def test_a_fixed_scale_clips():
    states = torch.tensor([0.1, 1.0, -12.7, 50.0]).repeat(1, 1, 8, 2)
    decoded = round_trip(states, "int8 tensor")
    assert torch.allclose(decoded[0, 0, 0, :4], torch.tensor([0.1, 1.0, -12.7, 12.7]), atol=0.01)


def test_the_hadamard_matrix_is_symmetric_and_orthonormal():
    for size in (1, 2, 64, 256):
        matrix = hadamard(size, torch.device("cpu"))
        assert torch.equal(matrix, matrix.T)
        assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [(64, "int4 token 32 hadamard"), (96, "int4 token 32"), (20, "int4 token"), (5, "int4 token")],
)
def test_a_spec_is_fitted_to_a_head_dim(head_dim, expected):
    spec = CodecSpec.parse("int4 token 32 hadamard").fitted_to(head_dim, 128)
    assert str(spec) == expected
    BlockCodec(spec, "value", head_dim, 128, torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="int3"), "kind: expected one of"),
        (dict(kind="int8", axis="row"), "axis: expected one of"),
        (dict(kind="int8", rotation="random"), "rotation: expected"),
        (dict(kind="int8", group_size=0), "group_size: expected an int"),
        (dict(kind="int8", group_size=True), "group_size: expected an int"),
        (dict(kind="int8", axis="tensor", group_size=8), "axis 'tensor'"),
        (dict(kind="full", rotation="hadamard"), "kind 'full'"),
        (dict(kind="int8", symmetric=True), "symmetric: expected False"),
    ],
)
def test_specs_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CodecSpec(**options)


@pytest.mark.parametrize(
    ("spec", "role", "head_dim", "block_size", "message"),
    [
        ("int4 token 24", "key", 64, 128, "group_size: expected a divisor of the head dim"),
        ("int4 channel 24", "key", 64, 128, "group_size: expected a divisor of the block size"),
        ("int4 token 5", "value", 5, 128, "group_size"),
        ("int8 token hadamard", "key", 96, 128, "rotation: expected a head dim that is a power of two"),
        ("int8 channel", "value", 64, 128, "axis: expected 'token' or 'tensor' for values"),
        ("int8 token", "key", 64, 12, "block_size: expected a power of two"),
    ],
)
def test_specs_that_do_not_fit_the_geometry_are_refused(spec, role, head_dim, block_size, message):
    with pytest.raises(ValueError, match=message):
        codec(spec, role, head_dim, block_size)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_only_floats_are_encoded(dtype):
    with pytest.raises(TypeError, match="expected a floating dtype"):
        codec("int8 token", dtype=dtype)


def test_states_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="states: expected"):
        codec("int8 token").encode(torch.randn(1, 2, 16, 32))


@pytest.mark.parametrize(
    ("keys", "values", "bar"),
    [
        ("int8 token", "int8 token", 0.295),
        ("fp8 token", "fp8 token", 0.295),
        ("int4 channel 32 hadamard", "int4 token hadamard symmetric", 0.175),
        ("int4 channel 32 hadamard", "int4 token 32 hadamard", 0.195),
        ("int2 channel 32 hadamard", "int2 token 32 hadamard", 0.135),
    ],
)
def test_bytes_at_8000_tokens_are_a_small_part_of_float32(keys, values, bar):
    heads, head_dim, block, tail, sinks, capacity = 3, 64, 128, 256, 4, 8192
    blocks = (capacity - 128) // block
    encoded = blocks * sum(
        codec(spec, role, 64, 128).bytes_per_block(heads) for role, spec in (("key", keys), ("value", values))
    )
    exact = 2 * heads * head_dim * 4 * (tail + sinks)
    assert (encoded + exact) / (2 * heads * head_dim * 4 * 8000) <= bar
