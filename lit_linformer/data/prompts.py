"""What `predict` is given: `data.text`, and the lines of `data.file`."""

from pathlib import Path

from lit_linformer.data.reading import text_lines


def read_prompts(text: str | list[str] | None, file: str | None) -> list[tuple[str, str]]:
    """(where it comes from, text) of every prompt: `text`, then the lines of `file` that are not blank."""
    texts = [text] if isinstance(text, str) else list(text or [])
    prompts = [("data.text", prompt) for prompt in texts]
    if file is not None:
        lines = text_lines(Path(file), "data.file")
        prompts += [(f"data.file={file!r}, line {number}", line) for number, line, _ in lines if line.strip()]
    if not prompts:
        raise ValueError("nothing to predict: give data.text (one text or a list) or data.file (one text a line)")
    return prompts


def shortened(text: str) -> str:
    """For an error message."""
    return text if len(text) <= 200 else f"{text[:200]}…"
