"""A Linformer's slots for a text, as a picture: `python run.py draw --ckpt_path runs/quickstart --text "…" --output slots.png`.

Each layer is drawn as three maps, with a column for each token of the text:

    what feeds a slot       E, that layer's k × n projection, at the text's tokens: slot by token
    who reads a slot        the share of a token's attention that goes to it, mean of the heads or one --head: slot by token
    which token reaches     both combined, P |E| with rows that sum to 1: reading token by token that is read

The slots that get most of the attention are drawn, in their order (--slots); if a layer also sees tokens, as in lookup and
window, these count like slots. The three most read of each layer are printed: their share, the tokens that feed them most and
those that read them most. Short texts leave most slots of a learned E nearly empty.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_linformer.utils.arguments import Setting, listed, parse, whole, word
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.figures import figure_class, literal, rendered
from lit_linformer.utils.files import write_bytes

if TYPE_CHECKING:  # the help needs no torch
    from torch import Tensor

    from lit_linformer.model import EncoderConfig

SETTINGS = {
    "ckpt_path": Setting(word("FILE|RUN|FOLDER"), "checkpoint, run (its best checkpoint), or exported folder", required=True),
    "text": Setting(word("TEXT"), "text for the model, with or without mask tokens", required=True),
    "output": Setting(word("FILE.png"), "also .pdf or .svg", required=True),
    "layers": Setting(listed(whole("LAYER")), "layers to draw, from 0 (default: the first and the last)"),
    "head": Setting(whole("HEAD"), "one head's attention, from 0 (default: the mean of all)"),
    "slots": Setting(whole("N", 1), "how many slots to draw", 24),
}
SUFFIXES = (".png", ".pdf", ".svg")
MOST_TOLD = 3  # slots of a layer that are also printed
MOST_NAMES = 64  # tokens whose names fit under a map, and rows beside it; of more every second one is named, and so on


def main(argv: list[str]) -> None:
    """Draws and prints; raises ValueError, in one line, for bad input."""
    given = parse("draw", __doc__, SETTINGS, argv)
    output = Path(given["output"])
    if output.suffix not in SUFFIXES or output.is_dir():
        raise SettingError("output", output, f"a file that ends in {', '.join(SUFFIXES)}")
    if not given["text"].strip():
        raise SettingError("text", given["text"], "something to draw")
    layers, head, count = given["layers"], given["head"], given["slots"]

    from lit_linformer.model.lowrank import check_layers
    from lit_linformer.runs.trained_model import open_checkpoint

    if (figure := figure_class()) is None:
        allowed = "pip install 'lit-linformer[plots]'"
        raise SettingError("output", output, allowed, more=", which needs matplotlib", when="after")
    model = open_checkpoint(given["ckpt_path"])
    config, tokenizer = model.encoder, model.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode(given["text"]), tokenizer.eos_id]
    if len(ids) > config.max_length:
        raise UserError(f"text has {len(ids)} tokens with bos and eos", f"up to max_length = {config.max_length}")
    layers = check_layers("layers", [0, config.num_layers - 1] if layers is None else layers, config)
    if head is not None and head >= config.num_heads:
        raise SettingError("head", head, f"0 to {config.num_heads - 1}")

    names = [tokenizer.decode([i]).strip() or repr(tokenizer.decode([i])) for i in ids]
    maps = [slot_maps(model.net.encoder, ids, layer, head) for layer in layers]
    if any(found is None for found in maps):
        raise UserError(f"ckpt_path is {given['ckpt_path']}, {_why_not(config)}")
    rows = [row_names(config, layer, len(reads), names) for layer, (_, reads) in zip(layers, maps, strict=True)]
    for layer, (feeds, reads), of_rows in zip(layers, maps, rows, strict=True):
        print(as_text(layer, feeds, reads, names, of_rows, min(count, MOST_TOLD)))
    picture = draw(figure, layers, maps, names, rows, count)
    write_bytes(output, rendered(picture, dpi=120, format=output.suffix[1:]))
    print(f"→ {output}", flush=True)


def slot_maps(encoder: Any, ids: list[int], layer: int, head: int | None) -> "tuple[Tensor, Tensor] | None":
    """What feeds each slot and who reads it, for one row of N tokens.

    These are E of the keys, (K, N), and the attention, (K, N), whose columns sum to 1; None if there is no such matrix.
    SettingError if the attention returns no maps. head: its index; None: the mean of all.
    """
    import torch

    seen: list[Tensor] = []
    module = encoder.layers[layer].attention
    hook = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        with torch.inference_mode():
            _, maps = encoder(torch.tensor([ids]), need_weights=[layer])
            E = module.matrix(seen[0], **encoder.shared)  # (K, N), or (H, K, N)
    finally:
        hook.remove()
    if E is None:
        return None
    if layer not in maps:
        more = ", whose forward gives no maps"
        raise SettingError("attention", encoder.config.attention, "one that takes need_weights", more=more)
    E, attention = E.detach(), maps[layer][0]  # (H, N, K)
    if E.dim() == 3:
        E = E.mean(0) if head is None else E[head]
    return E, (attention.mean(0) if head is None else attention[head]).T


def _why_not(config: "EncoderConfig") -> str:
    """The end of the error line: which part of the model has no slots to draw, and what would have them."""
    from lit_linformer.model import ATTENTIONS, PROJECTIONS, Attention

    drawn = [name for name, kind in ATTENTIONS.items() if kind.matrix is not Attention.matrix]
    if config.attention_kind.matrix is Attention.matrix:
        return f"whose attention is {config.attention!r}; allowed: {', '.join(drawn)}, or one that has `matrix`"
    return f"whose projection is {config.projection!r}; allowed: {', '.join(PROJECTIONS)}, or one that has `matrix`"


def row_names(config: "EncoderConfig", layer: int, count: int, names: list[str]) -> list[str]:
    """Names of the maps' rows: slots, and below them the tokens if the layer sees those, too."""
    slots = config.projection_dims[layer] if config.attention_kind.slots else count
    return [f"slot {row}" if row < slots else f"token {names[row - slots]}" for row in range(count)]


def most_read(reads: "Tensor", count: int) -> list[int]:
    """The ``count`` slots that get most of the attention in ``reads`` (K, N), in their order."""
    return sorted(reads.sum(1).topk(min(count, len(reads))).indices.tolist())


def as_text(layer: int, feeds: "Tensor", reads: "Tensor", names: list[str], rows: list[str], count: int) -> str:
    """A line for each slot, or token that is seen besides the slots."""

    def strongest(row: "Tensor") -> str:
        found = row.abs().topk(min(3, len(names)))
        return ", ".join(f"{names[i]} {row[i]:.3g}" for i in found.indices.tolist())

    shares = reads.mean(1)
    lines = [f"layer {layer}"]
    for slot in most_read(reads, count):
        fed = f"fed by {strongest(feeds[slot])}; " if rows[slot].startswith("slot ") else ""
        lines.append(f"  {rows[slot]}: {shares[slot]:.1%} of the attention; {fed}read by {strongest(reads[slot])}")
    return "\n".join(lines)


def draw(figure_class: Any, layers: list[int], maps: list, names: list[str], of_rows: list[list[str]], count: int) -> Any:
    """The picture: a row of three maps for each layer."""
    width = min(2.5 + 0.13 * len(names), 8)
    figure = figure_class(figsize=(3 * width, len(layers) * (width * 0.9 + 0.6)), layout="constrained")
    axes = figure.subplots(len(layers), 3, squeeze=False)
    every = -(-len(names) // MOST_NAMES)
    ticks, shown = range(0, len(names), every), [literal(name) for name in names[::every]]
    for row, layer, (feeds, reads), called in zip(axes, layers, maps, of_rows, strict=True):
        slots = most_read(reads, count)
        reach = reads.T @ feeds.abs()
        reach = reach / reach.sum(1, keepdim=True).clamp(min=1e-12)
        most = max(feeds[slots].abs().max().item(), 1e-12)
        strengths = {"cmap": "viridis", "vmin": 0}
        panels = (
            ("what feeds a slot (E)", feeds[slots], {"cmap": "RdBu_r", "vmin": -most, "vmax": most}),
            ("who reads a slot (attention)", reads[slots], strengths),
            ("which token reaches which", reach, strengths),
        )
        for axis, (title, values, colours) in zip(row, panels, strict=True):
            image = axis.imshow(values.numpy(), aspect="auto", **colours)
            axis.set_title(f"layer {layer}: {title}", fontsize=10)
            axis.set_xticks(ticks, shown, rotation=90, fontsize=7)
            figure.colorbar(image, ax=axis, shrink=0.7)
        by = -(-len(slots) // MOST_NAMES)
        for axis in row[:2]:
            axis.set_yticks(range(0, len(slots), by), [literal(called[slot]) for slot in slots[::by]], fontsize=7)
        row[2].set_yticks(ticks, shown, fontsize=7)
        row[2].set_ylabel("reads", fontsize=8)
    return figure
