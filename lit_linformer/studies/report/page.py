"""The page of `report`: Markdown with figures, and the same as one self-contained HTML file."""

import base64
import html
import re
from collections.abc import Callable
from typing import Any

from lit_linformer.utils.figures import figure_class, rendered
from lit_linformer.utils.markdown import plain

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: auto; padding: 1rem; }
h1, h2, h3, h4, li { overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 2px solid #1a1a1a; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
h4 { font-size: 1rem; font-weight: 600; color: #444; margin: 1rem 0 .25rem; }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; }
code { font: .85em/1.4 ui-monospace, monospace; background: #f3f3f3; padding: .1em .3em; overflow-wrap: anywhere; }
li { margin: .2rem 0; }
/* A wide table may be wider than the text, up to the window. */
.scroll { overflow-x: auto; margin: .75rem 0; min-width: 100%; width: max-content; max-width: calc(100vw - 3rem);
  position: relative; left: 50%; transform: translateX(-50%); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid #ddd; vertical-align: top; white-space: nowrap; }
th { border-bottom: 1px solid #1a1a1a; text-align: left; vertical-align: bottom; white-space: normal; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; width: auto; max-width: none; position: static; transform: none; }
  th, td { white-space: normal; }
  h2, h3, h4 { break-after: avoid; }
  img, tr { break-inside: avoid; }
}
"""


class Page:
    """Pieces of Markdown, and {name: PNG} of the images that they show."""

    def __init__(self, title: str):
        self.title = " ".join(title.split())
        self.parts = [f"# {plain(self.title)}\n"]
        self.images: dict[str, bytes] = {}

    def add(self, *texts: str) -> None:
        self.parts += [f"{text.rstrip()}\n" for text in texts if text.strip()]

    def show(self, name: str, what: str, draw: Callable[[Any], Any]) -> None:
        """Adds the figure that ``draw`` makes with matplotlib's Figure, if any; further ones of the same name are numbered."""
        if (figure_kind := figure_class()) is None or (figure := draw(figure_kind)) is None:
            return
        number = sum(re.fullmatch(rf"{name}(-\d+)?\.png", other) is not None for other in self.images) + 1
        file = f"{name}.png" if number == 1 else f"{name}-{number}.png"
        self.images[file] = rendered(figure, format="png", dpi=150, metadata={"Software": None})
        self.add(f"![{plain(what)}]({file})")

    def markdown(self) -> str:
        return "\n".join(self.parts)

    def html(self) -> str:
        from markdown import Markdown

        converter = Markdown(extensions=["tables", "sane_lists"], output_format="html")
        # Logs and names of runs are plain text, even where they look like HTML.
        converter.preprocessors.deregister("html_block")
        converter.inlinePatterns.deregister("html")
        body = converter.convert(self.markdown())
        body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
        for file, content in self.images.items():
            body = body.replace(f'src="{file}"', f'src="data:image/png;base64,{base64.b64encode(content).decode()}"')
        head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        head += f"<title>{html.escape(self.title)}</title>\n<style>{STYLE}</style>\n"
        return f'<!doctype html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{body}\n</body>\n</html>\n'
