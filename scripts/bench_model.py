"""Time of forward plus backward against n: our Linformer layers, the `linformer` package's, and fused full attention.

    python scripts/bench_model.py --lengths 512 1024 2048 4096 --rounds 7

Needs the extra `[dev]` (the package `linformer`). Equal shape: width, heads, depth, feed-forward 4 D with GELU, pre-norm, one E
and one F a layer (sharing="headwise"), hidden states in and out. Each round times every model once, in turn; the printed ratios
are medians of the rounds' ratios.
"""

import argparse
import statistics
import time

import torch
from linformer import Linformer as Peer
from torch import nn

from lit_linformer.model import EncoderConfig, EncoderLayer


class Ours(nn.Module):
    def __init__(self, n: int, attention: str, args: argparse.Namespace, local_width: int = 0):
        super().__init__()
        config = EncoderConfig(
            max_length=n,
            hidden_size=args.width,
            num_layers=args.depth,
            num_heads=args.heads,
            intermediate_size=4 * args.width,
            attention=attention,
            projection_dim=args.k,
            sharing="headwise",
            local_width=local_width,
            norm="pre",
            dropout=0.0,
            attention_dropout=0.0,
        )
        self.layers = nn.ModuleList(EncoderLayer(config, index) for index in range(args.depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x, None, None, False)
        return x


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="n")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a batch, whatever n")
    parser.add_argument("--width", type=int, default=256, help="D")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--k", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, D {args.width}, k {args.k}, {args.tokens} tokens, float32")
    print(f"{'n':>6} {'ours µs/token':>14} {'ours/peer':>10} {'ours/full':>10} {'+ local branch/full':>20}")
    for n in args.lengths:
        models = {
            "ours": Ours(n, "linformer", args),
            "peer": Peer(args.width, n, args.depth, k=args.k, heads=args.heads),
            "full": Ours(n, "full", args),
            "local": Ours(n, "linformer", args, local_width=5),
        }
        x = torch.randn(max(1, args.tokens // n), n, args.width, requires_grad=True)
        for model in models.values():
            seconds(model, x)
        rounds = [{name: seconds(model, x) for name, model in models.items()} for _ in range(args.rounds)]

        def ratio(a: str, b: str, rounds=rounds) -> str:
            ratios = [one[a] / one[b] for one in rounds]
            return f"{statistics.median(ratios):.2f}"

        per_token = statistics.median(one["ours"] for one in rounds) / x.shape[:2].numel() * 1e6
        print(f"{n:>6} {per_token:>14.1f} {ratio('ours', 'peer'):>10} {ratio('ours', 'full'):>10} {ratio('local', 'full'):>20}")


if __name__ == "__main__":
    main()
