"""For the tests of each mechanism: one with random parameters, rows to give it, and the comparison with its formula."""

import torch


def made(kind, *shape, std=1.0, **options):
    """In float64, with all parameters random, so that nothing agrees by being zero; the same in each call."""
    torch.manual_seed(0)
    module = kind(*shape, **options).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module


def three_rows(length, padded):
    """The lengths of three rows, and their mask, or None."""
    lengths = [length, max(1, length // 2), max(1, length - 3)] if padded else [length] * 3
    return lengths, torch.arange(length) < torch.tensor(lengths)[:, None] if padded else None


def assert_agree(found, expected, x, tolerance=1e-10):
    """Both are equal, and so are their gradients by x."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=100 * tolerance, atol=100 * tolerance)
