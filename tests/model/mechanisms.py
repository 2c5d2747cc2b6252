"""EncoderConfig settings of every mechanism except linformer, plain lookup and full, for tests that apply to all."""

MECHANISMS = {
    "sparse": {"attention": "sparse", "attention_options": {"stride": 4, "reach": 3}},
    "window": {"attention": "window", "attention_options": {"window": 4}},
    "window, project first": {"attention": "window", "order": "project_first", "attention_options": {"window": 2}},
    "lookup, window": {"attention": "lookup", "attention_options": {"chunk": 4, "window": 4}},
    "lookup, distance": {"attention": "lookup", "num_heads": 4, "attention_options": {"chunk": 4, "window": 2, "distance": 2}},
    "lookup, window, rare": {"attention": "lookup", "attention_options": {"chunk": 4, "window": 4, "rare": 3}},
    "dynamic": {"projection": "dynamic"},
    "long-short": {
        "attention": "window", "projection": "dynamic", "sharing": "heads", "order": "project_first",
        "attention_options": {"window": 4, "dual_norm": True},
    },
    "nystrom": {"attention": "nystrom"},
    "luna": {"attention": "luna"},
    "lsh": {"attention": "lsh", "attention_options": {"chunk": 4, "rounds": 2}},
    "gated": {"projection": "gated"},
    "gated channels": {"projection": "gated", "sharing": "heads", "projection_options": {"gate": "channel", "overlap": 1}},
    "coarse": {"attention": "coarse", "attention_options": {"best": 2}},
    "coarse, gated": {"attention": "coarse", "projection": "gated", "order": "project_first"},
}  # fmt: skip

# Pixels as tokens, for tests where n is a square (or n + 2) and k squares tile it.
IMAGE = {"position": "image", "projection_init": "squares"}

# The parts of conf/model/modern.yaml, with every attention and projection that supports rotary positions.
MODERN = {"norm": "pre", "norm_type": "rms", "position": "rotary", "feed_forward": "geglu", "bias": False, "head_bias": False}
MODERN |= {"order": "project_first", "local_width": 3}
MODERNS = {
    f"modern {name}": MODERN | settings
    for name, settings in {
        "full": {"attention": "full"},
        "linformer": {"sharing": "headwise"},
        "mean": {"projection": "mean"},
        "lookup": {"attention": "lookup", "attention_options": {"chunk": 4}},
        **{name: kind for name, kind in MECHANISMS.items() if name not in ("long-short", "luna", "gated channels")},
    }.items()
}
