"""An attention and its settings in one word, as `benchmark --models` takes it: window:window=64+projection=dynamic."""

from dataclasses import fields
from typing import Any

import yaml

from lit_linformer.utils.errors import SettingError


def kind_settings(word: str) -> dict[str, Any]:
    """NAME or NAME:SETTING=VALUE+… → EncoderConfig's settings. A SETTING is one of EncoderConfig's, or of attention_options, or
    projection_options.SETTING. ValueError for another form."""
    from lit_linformer.model import EncoderConfig

    name, _, rest = word.partition(":")
    known, found = {field.name for field in fields(EncoderConfig)}, {"attention": name}
    for part in rest.split("+") if rest else ():
        key, equals, text = part.partition("=")
        if not equals or key in ("", "attention", "projection_dim", "max_length"):
            raise SettingError("models", word, "NAME, or NAME:SETTING=VALUE+… as window:window=64+sharing=heads")
        value = yaml.safe_load(text)
        if key in known:
            found[key] = value
        else:
            options, _, key = key.rpartition(".")
            found.setdefault(options or "attention_options", {})[key] = value
    return found
