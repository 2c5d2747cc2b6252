"""E alone: counts, initialisation, windows, errors, and what the state dict contains."""

import pytest
import torch

from lit_linformer.model import make_projection
from lit_linformer.model.projection import PROJECTIONS, project
from lit_linformer.model.projections import windows
from lit_linformer.model.starts import PROJECTION_INITS, initial_matrix


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_makes_k_slots_of_any_length(kind):
    projection = make_projection(kind, max_length=30, projection_dim=10, channels=4)
    for length in (1, 7, 29, 30):
        assert projection(torch.randn(2, length, 4)).shape == (2, 10, 4)
        assert projection(torch.randn(2, 3, length, 4)).shape == (2, 3, 10, 4)


@pytest.mark.parametrize(("length", "more", "count"), [(1, 0, 1), (8, 0, 1), (9, 0, 2), (9, 1, 3), (32, 0, 4), (25, 1, 4)])
def test_windows_without_tokens_are_left_out(length, more, count):
    found = windows(make_projection("mean", max_length=32, projection_dim=4), torch.ones(2, length, 3), 0.0, more)
    assert found.shape == (2, count, 8, 3)
    assert torch.equal(found.sum((1, 2)), torch.full((2, 3), float(length)))


@pytest.mark.parametrize("kind", ["linear", "gaussian", "conv"])
@pytest.mark.parametrize(("num_heads", "width"), [(None, ()), (None, (3,)), (3, (3,))], ids=["x", "heads", "a matrix a head"])
def test_short_rows_go_on_with_their_mean(kind, num_heads, width):
    made = [make_projection(kind, 12, 4, num_heads=num_heads, channels=5, short_rows=how) for how in ("mean", "zeros")]
    mean, zeros = (projection.double() for projection in made)
    for tensor in mean.state_dict().values():
        torch.nn.init.normal_(tensor)
    zeros.load_state_dict(mean.state_dict())
    x = torch.randn(3, *width, 7, 5, dtype=torch.float64, requires_grad=True)
    lengths = [7, 4, 1]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    real = mask.view(3, *[1] * len(width), 7, 1)
    found, unmasked = mean(x * real, mask), mean(x)
    assert torch.equal(mean(x * real, mask.byte()), found)
    for b, length in enumerate(lengths):
        row = x[b : b + 1, ..., :length, :]
        repeated = [1] * (x.dim() - 2) + [12 - length, 1]
        expected = zeros(torch.cat([row, row.mean(-2, keepdim=True).repeat(repeated)], -2))
        torch.testing.assert_close(found[b : b + 1], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mean(row), expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0][b] for y in (found[b], expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(unmasked[0], found[0], rtol=1e-12, atol=1e-12)
    full = torch.randn(2, *width, 12, 5, dtype=torch.float64)
    assert torch.equal(mean(full), zeros(full))
    if kind == "conv":  # whose matrix is the mean over the channels
        mean.weight.data = mean.weight.data.mean(-1, keepdim=True).expand_as(mean.weight).clone()
    torch.testing.assert_close(mean.matrix(x) @ x, mean(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["conv", "mean", "max", "gated"])
def test_windows_that_do_not_tile_n_are_refused(kind):
    # Another implementation's convolution yields 10 slots for k = 8 at n = 30.
    with pytest.raises(ValueError, match=r"projection_dim \(k\) is 8.*divisors of max_length = 30"):
        make_projection(kind, max_length=30, projection_dim=8)


@pytest.mark.parametrize("k", [0, 31])
def test_k_outside_1_to_n_is_refused(k):
    with pytest.raises(ValueError, match=rf"projection_dim \(k\) is {k}; allowed: 1 to max_length = 30"):
        make_projection("linear", max_length=30, projection_dim=k)


def test_unknown_names_are_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="projection is 'pool'; allowed: linear, conv, mean, max, gaussian"):
        make_projection("pool", 8, 4)
    with pytest.raises(ValueError, match="projection_init is 'ones'; allowed: block_mean"):
        make_projection("linear", 8, 4, init="ones")


def test_block_mean_equals_mean_pooling_and_strided_picks_tokens():
    x = torch.randn(2, 12, 5)
    block_mean, mean = make_projection("linear", 12, 4, init="block_mean"), make_projection("mean", 12, 4)
    torch.testing.assert_close(block_mean(x), mean(x))
    torch.testing.assert_close(mean(x), x.view(2, 4, 3, 5).mean(2))
    torch.testing.assert_close(make_projection("linear", 12, 4, init="strided")(x), x[:, ::3])
    torch.testing.assert_close(make_projection("max", 12, 4)(x), x.view(2, 4, 3, 5).amax(2))


def test_block_mean_tiles_n_when_k_does_not_divide_it():
    E = initial_matrix("block_mean", 30, 8)
    assert (E.gt(0).sum(0) == 1).all(), "each token is in one window"
    torch.testing.assert_close(E.sum(1), torch.ones(8))


@pytest.mark.parametrize("init", PROJECTION_INITS)
def test_starts_have_the_scale_they_claim(init):
    torch.manual_seed(0)
    E = initial_matrix(init, 1026, 256) if init == "squares" else initial_matrix(init, 512, 128)
    windows = {"block_mean": 0.25, "split": 0.25, "strided": 1.0, "squares": 0.25}
    expected = {**windows, "normal": 128**-0.5, "xavier": 0.5**0.5 * (6 / 640) ** 0.5}[init]
    measured = E.abs().max() if init != "normal" else E.std()
    assert measured.item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("side", "across"), [(4, 2), (6, 3), (32, 16), (5, 1), (3, 3)])
@pytest.mark.parametrize("around", [0, 1])
def test_squares_are_means_of_squares_of_an_image(side, across, around):
    width, n = side // across, side**2 + 2 * around
    x = torch.randn(2, n, 3, dtype=torch.float64)
    image = x[:, around : n - around].view(2, side, side, 3)
    expected = [
        image[:, width * row : width * (row + 1), width * column : width * (column + 1)].mean((1, 2))
        for row in range(across)
        for column in range(across)
    ]
    found = make_projection("linear", n, across**2, init="squares").double()
    torch.testing.assert_close(found(x), torch.stack(expected, 1), rtol=1e-7, atol=1e-7)  # weights are initialised in float32
    assert not around or not found.weight[:, [0, -1]].any()  # bos and eos
    mask = torch.arange(n)[None] < n - around - 1  # without the last pixel
    mass = found.mass(x, mask)[0, 0]
    torch.testing.assert_close(mass, torch.ones(across**2).index_fill(0, torch.tensor(across**2 - 1), 1 - width**-2).to(mass))


def test_strided_heads_start_at_different_tokens():
    E = make_projection("linear", 16, 4, num_heads=4, init="strided").weight
    assert [row.argmax().item() for row in E[:, 0]] == [0, 1, 2, 3]


SPLITS = {1: [(0, 4)], 2: [(0, 2), (2, 4)], 3: [(0, 1), (1, 2), (2, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


@pytest.mark.parametrize(("heads", "parts"), SPLITS.items())
def test_split_heads_share_out_each_window(heads, parts):
    x = torch.randn(1, heads, 16, 5)
    windows = x.view(1, heads, 4, 4, 5)
    expected = torch.stack([windows[:, h, :, first:after].mean(2) for h, (first, after) in enumerate(parts)], 1)
    for kind in ("linear", "conv"):
        torch.testing.assert_close(make_projection(kind, 16, 4, num_heads=heads, channels=5, init="split")(x), expected)


def test_split_heads_beyond_a_windows_tokens_share_them():
    E = make_projection("linear", 8, 4, num_heads=6, init="split").weight
    assert [row.argmax().item() for row in E[:, 0]] == [0, 0, 0, 1, 1, 1] and E.sum() == 6 * 4


def test_conv_refuses_starts_that_are_no_window():
    message = "projection_init is 'xavier'; allowed with projection='conv': block_mean, split, strided"
    with pytest.raises(ValueError, match=message):
        make_projection("conv", 8, 4, init="xavier")


def test_convolution_is_torchs_depthwise_one():
    projection = make_projection("conv", max_length=12, projection_dim=4, channels=5)
    torch.nn.init.normal_(projection.weight)
    x = torch.randn(2, 12, 5)
    kernel = projection.weight.t()[:, None]  # (C, 1, n/k)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), kernel, stride=3, groups=5).transpose(1, 2)
    torch.testing.assert_close(projection(x), expected)


@pytest.mark.parametrize(
    ("E", "x"), [((4, 6), (3, 6, 8)), ((4, 6), (3, 2, 6, 8)), ((2, 4, 6), (3, 2, 6, 8)), ((4, 6), (1, 6, 8))], ids=str
)
def test_project_is_the_matrix_product(E, x):
    E, x = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (E, x))
    found = []
    for y in (project(E, x), E @ x):
        found.append((y, *torch.autograd.grad(y.square().sum(), (E, x))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_reload_gives_the_same_output(kind):
    x = torch.randn(1, 8, 3)
    first, second = (
        make_projection(kind, 8, 4, channels=3, init="split" if kind in ("conv", "gated") else "xavier") for _ in range(2)
    )
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)


def test_gaussian_is_fixed_and_of_variance_1_over_k():
    torch.manual_seed(0)
    projection = make_projection("gaussian", 512, 64)
    assert not list(projection.parameters()) and "weight" in projection.state_dict()
    assert projection.weight.var().item() == pytest.approx(1 / 64, rel=0.05)


def test_two_projections_share_nothing():
    first, second = make_projection("linear", 8, 4), make_projection("linear", 8, 4)
    first.weight.data.zero_()
    assert second.weight.abs().sum() > 0


def test_mass_is_one_for_full_rows_zero_for_empty_slots():
    projection = make_projection("linear", 8, 4, init="block_mean")
    x = torch.randn(2, 8, 3)
    assert projection.mass(x, None) is None
    mask = torch.tensor([[True] * 8, [True] * 3 + [False] * 5])
    mass = projection.mass(x, mask)
    torch.testing.assert_close(mass, torch.tensor([[[1.0, 1, 1, 1]], [[1.0, 0.5, 0, 0]]]))
    torch.testing.assert_close(projection.mass(x[:, :3], None)[0, 0], mass[1, 0])


@pytest.mark.parametrize("kind", ["conv", "mean", "max"])
def test_mass_of_windows_is_as_exact_as_what_is_compressed(kind):
    projection = make_projection(kind, 6, 2, channels=3)
    mass = projection.mass(torch.randn(1, 5, 3, dtype=torch.float64), None)
    torch.testing.assert_close(mass, torch.tensor([[[1.0, 2 / 3]]], dtype=torch.float64))
