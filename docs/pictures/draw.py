"""Draw the pictures of `docs/idea.md`: python docs/pictures/draw.py writes an SVG for each beside this file."""

from __future__ import annotations

from pathlib import Path

INK, QUIET, PAPER = "#1f2937", "#6b7280", "#ffffff"
OF_DEVICE = ("#9ecbff", "#a6e3b4", "#ffd591", "#d9b8ff")
HALF = 28  # of a drawn tensor, in points


def svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    back = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', back, *parts, "</svg>\n"])


def text(x: float, y: float, said: str, color: str = INK, anchor: str = "middle") -> str:
    escaped = said.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{escaped}</text>'


def box(x: float, y: float, w: float, h: float, fill: str = PAPER, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{INK}"{dash}/>'


def arrow(x: float, y: float, to: float) -> list[str]:
    line = f'<line x1="{x}" y1="{y}" x2="{to - 6}" y2="{y}" stroke="{INK}"/>'
    return [line, f'<polygon points="{to},{y} {to - 7},{y - 4} {to - 7},{y + 4}" fill="{INK}"/>']


def tensor(x: float, y: float, cut: str, said: str) -> list[str]:
    """A matrix over two devices: cut by rows "S(0)", by columns "S(1)", whole "R", or a part of a sum "P(sum)"."""
    side = 2 * HALF
    places = {
        "S(0)": [(x, y, side, HALF), (x, y + HALF, side, HALF)],
        "S(1)": [(x, y, HALF, side), (x + HALF, y, HALF, side)],
        "R": [(x, y, side, side), (x + 5, y + 5, side, side)],
        "P(sum)": [(x, y, side, side), (x + 5, y + 5, side, side)],
    }[cut]
    found = [box(*place, fill=color, dashed=cut == "P(sum)") for place, color in zip(places, OF_DEVICE, strict=False)]
    return [*found, text(x + HALF, y + side + 24, f"{said}: {cut}")]


def stages() -> str:
    values = ("Module", "Graph", "Space", "Plan", "ParallelModule")
    passes = ("trace", "list", "solve", "lower")
    held = ("your model", "one node per op", "all ways, each priced", "one way, and a bound", "code of each rank")
    parts = []
    for i, (value, said) in enumerate(zip(values, held, strict=True)):
        x = 10 + 172 * i
        parts += [box(x, 30, 118, 40), text(x + 59, 55, value), text(x + 59, 92, said, QUIET)]
        if i < len(passes):
            parts += [*arrow(x + 118, 50, x + 172), text(x + 145, 40, passes[i], QUIET)]
    return svg(830, 110, parts)


def product() -> str:
    """One matrix product, and three ways in which two devices share it."""
    ways = [
        ("S(0)", "R", "S(0)", "rows"),
        ("R", "S(1)", "S(1)", "columns"),
        ("S(1)", "S(0)", "P(sum)", "the inner dim"),
    ]
    parts = []
    for i, (x, w, out, said) in enumerate(ways):
        left = 20 + 275 * i
        parts.append(text(left + 110, 20, f"cut by {said}"))
        for k, (name, cut) in enumerate((("x", x), ("w", w), ("x @ w", out))):
            parts += tensor(left + 82 * k, 34, cut, name)
    return svg(840, 135, parts)


def mlp() -> str:
    """A block of two layers on a mesh (dp=2, tp=2)."""
    steps = [
        ("x", "S(0)@dp", "rows over dp"),
        ("up.weight", "S(0)@tp", "columns over tp"),
        ("hidden", "S(0)@dp, S(1)@tp", "no communication"),
        ("down.weight", "S(1)@tp", "rows over tp"),
        ("sum", "S(0)@dp, P(sum)@tp", "a part of a sum"),
        ("out", "S(0)@dp", "after an all-reduce over tp"),
    ]
    parts = []
    for i, (name, cut, said) in enumerate(steps):
        x = 10 + 150 * i
        fill = "#eef2ff" if "weight" in name else PAPER
        parts += [box(x, 20, 132, 62, fill), text(x + 66, 42, name), text(x + 66, 64, cut, QUIET)]
        parts.append(text(x + 66, 102, said, QUIET))
        if i + 1 < len(steps):
            parts += arrow(x + 132, 51, x + 150)
    return svg(910, 120, parts)


if __name__ == "__main__":
    for name, drawn in (("stages", stages()), ("product", product()), ("mlp", mlp())):
        Path(__file__).with_name(f"{name}.svg").write_text(drawn)
